"""Events of integrations.deep_ep: of the object's GPU, which need not be the thread's current one."""

import contextlib

import on_device
import torch

from moe_a2a.integrations.deep_ep import events


class Gpus:
    """In place of torch.cuda: which GPU was current when an event was recorded and waited for."""

    def __init__(self, monkeypatch):
        self.current, self.recorded, self.waiting = 0, [], []
        for name in ("is_available", "is_initialized"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def record(self):
        self.recorded.append(self.current)

    def wait(self):
        self.waiting.append(self.current)


@on_device.cpu_only
def test_events_are_of_the_object_s_gpu(monkeypatch):
    """Regression: a thread begins on GPU 0, whose stream has none of the work of an object on another one."""
    gpus, device = Gpus(monkeypatch), torch.device("cuda:1")
    events.event_if(True, device)
    events.event_before(lambda: None, device)
    assert gpus.recorded == [1, 1]
    events.wait_for(events.EventOverlap(events.EventHandle()), device)
    assert gpus.recorded == [1, 1, 0] and gpus.waiting == [1] and gpus.current == 0


@on_device.cpu_only
def test_an_object_on_the_cpu_selects_no_gpu(monkeypatch):
    gpus, device = Gpus(monkeypatch), torch.device("cpu")
    assert events.event_if(False, device).event is None
    events.wait_for(events.event_if(True, device), device)
    assert gpus.current == 0 and gpus.waiting == [0]
