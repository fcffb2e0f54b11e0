"""How a submission can end, by name."""

from __future__ import annotations

PASS = "pass"
# verdict: its meaning for the submission's author.
MEANINGS = {
    PASS: "every output is right",
    "wrong": "an output is not the expected one",
    "raised": "custom_kernel(), the import or the end of a case raised an exception",
    "crash": "a rank's process died",
    "slow": "a call returned, but after its time limit",
    "hang": "a call did not return within twice its time limit; its processes were ended",
    "out_of_bounds": "bytes next to an input were written",
    "mutated_input": "an input changed during the call",
    "cached_output": "an output is that of an earlier call with other inputs",
    "replayed_seed": "right on the published seeds, which a submission can replay, but wrong on secret ones",
    "no_communication": "a rank had the right output although no other rank took part in the call",
    "not_back_to_back": "right with a barrier between calls, wrong or stuck without one",
    "clock": "the rank reports far less time than the harness's own process measured",
}


class SubmissionFailedError(Exception):
    """A submission has failed: `verdict` is a key of MEANINGS.

    details: the ranks' own messages, possibly many lines, or "".
    """

    def __init__(self, verdict: str, message: str, details: str = ""):
        super().__init__(message)
        self.verdict, self.message, self.details = verdict, message, details
