"""How a submission can end, by name."""

from __future__ import annotations

PASS = "pass"
# verdict: what it says to the submission's author.
MEANINGS = {
    PASS: "every output is right",
    "wrong": "an output is not the expected one",
    "raised": "an exception left custom_kernel(), the import, or the end of a case",
    "crash": "a rank's process died",
    "slow": "a call returned, after its time limit",
    "hang": "a call did not return within twice its time limit; its processes were ended",
    "out_of_bounds": "bytes next to an input were written",
    "mutated_input": "an input holds something else after the call",
    "cached_output": "an output is that of an earlier call, with other inputs",
    "replayed_seed": "right on the published seeds, which anybody can replay, and wrong on secret ones",
    "no_communication": "a rank had the right output though no other rank took part in the call",
    "not_back_to_back": "right with a barrier between calls, wrong or stuck without one",
    "clock": "the times reported by the rank are far below those that the harness's own process saw",
}


class SubmissionFailedError(Exception):
    """A submission has failed: `verdict` is a key of MEANINGS.

    details: what each rank had to say, of many lines, or "".
    """

    def __init__(self, verdict: str, message: str, details: str = ""):
        super().__init__(message)
        self.verdict, self.message, self.details = verdict, message, details
