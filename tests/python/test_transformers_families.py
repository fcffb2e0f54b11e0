"""Every MoE family of the installed transformers gives through moe_a2a the logits of eager."""

# ruff: noqa: E402 (what follows importorskip needs transformers)

import pytest

pytest.importorskip("transformers")

import transformers_sweep as sweep

pytestmark = [pytest.mark.cpu, pytest.mark.slow]


@pytest.mark.parametrize("family", sweep.families())
def test_logits_are_those_of_eager(family):
    comparison = sweep.compare(family)
    assert comparison.equal, comparison


def test_all_families_were_found():
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"} <= set(sweep.families())
