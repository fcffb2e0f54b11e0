"""Rules of check_isa.py about a family's listing, and about kernels that multiply."""

from amd_assembly import Kernel
from check_isa import main, short_name
from test_check_isa import listing, problems

MULTIPLY = """
.LBB0_1:
	ds_read_b64 v[0:1], v10
	v_mfma_f32_32x32x8_bf16 v[16:31], v[0:1], v[2:3], v[16:31]
	s_cbranch_scc0 .LBB0_1
	s_endpgm
"""


def test_products_are_the_matrix_units_work():
    assert problems("GroupedGemm", MULTIPLY) == []
    outside = MULTIPLY.replace("\ts_cbranch_scc0 .LBB0_1\n", "")
    scalar = MULTIPLY.replace("v_mfma_f32_32x32x8_bf16", "v_fma_f32")
    for lost in (outside, scalar):
        assert problems("GroupedGemm", lost) == ["no matrix instruction (v_mfma) in a loop"]


def test_kernels_are_named_as_in_the_source():
    symbols = {
        "_ZN7moe_a2a3hip12kernel_entryINS0_6TracedINS0_12DispatchSendEXadL_ZNS_E": "DispatchSend",
        "_ZN7moe_a2a3hip12kernel_entryINS0_11GroupedGemmINS_8Bfloat16ELb1EEEEEv": "GroupedGemm",
    }
    for symbol, name in symbols.items():
        assert short_name(Kernel(symbol, [], {})) == name


def test_a_listing_must_hold_the_kernels_of_its_family(tmp_path, capsys):
    """There is one listing per family: another family's listing lacks this one's kernels, which is not an error."""
    text = listing(("GroupedGemm", MULTIPLY))
    for family, lost in (("grouped_gemm_kernels", []), ("comm_kernels", []), ("combine_kernels", ["CombineRecv"])):
        path = tmp_path / f"{family}.gfx942.s"
        path.write_text(text)
        assert main([str(path)]) == (1 if lost else 0)
        said = capsys.readouterr().out
        assert all(f"no kernel {name}" in said for name in lost)
