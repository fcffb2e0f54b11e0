"""check_sass.py on small listings: a kernel that obeys its rule, and ones that break it."""

from check_sass import MOST_STACK, loads, main, problems, stack_problems, stacks

GOOD = """
	Function : one_shot
        /*0030*/                   LDG.E.128.STRONG.SYS R4, desc[UR4][R2.64] ;
        /*0040*/                   LD.E.64.STRONG.SYS R8, desc[UR4][R6.64] ;
        /*0050*/                   LDG.E R9, desc[UR4][R6.64] ;
        /*0060*/                   LDG.E.64.STRONG.GPU R9, desc[UR4][R6.64] ;
"""
SPLIT = (
    GOOD
    + """
	Function : dispatch
        /*0030*/                   LDG.E.STRONG.SYS R7, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.STRONG.SYS R9, desc[UR4][R2.64+0xc] ;
"""
)


def test_words_in_one_access():
    assert problems(loads(GOOD)) == []


def test_a_word_in_two_accesses():
    assert problems(loads(SPLIT)) == [
        "dispatch: 2 x LDG.E.STRONG.SYS, part of an LL word; LDG.E.128.STRONG.SYS expected"
    ]


def usage(**sizes):
    """As cuobjdump prints it: the kernels' names mangled, on two lines each."""
    return "Resource usage:\n Common:\n  GLOBAL:0\n" + "".join(
        f" Function _ZN7moe_a2a9cuda_bare12kernel_entryINS0_6TracedINS0_{len(name)}{name}EXadL_ZNS_14kMoeVocabularyEEEEEEvNT_4ArgsE:\n"
        f"  REG:124 STACK:{size} SHARED:1152 LOCAL:0 CONSTANT[0]:2056 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
        for name, size in sizes.items()
    )


def test_an_object_on_the_stack():
    assert stacks(usage(DispatchSend=40, Dispatch=120, CombineRecv=240)) == {"DispatchSend": 40, "Dispatch": 120}
    assert stack_problems({"DispatchSend": 64, "Dispatch": 128}) == []
    assert stack_problems({"DispatchSend": 360}) == [
        "DispatchSend: 360 bytes of stack > 64; which object does a call take by reference?"
    ]


def test_the_command(tmp_path, monkeypatch, capsys):
    disassembler = tmp_path / "cuobjdump"
    disassembler.write_text(f"#!/bin/sh\n[ $1 = -sass ] && cat '{tmp_path}/listing' || cat '{tmp_path}/usage'\n")
    disassembler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    small = usage(**dict.fromkeys(MOST_STACK, 40))
    for listing, of_kernels, code, said in (
        (GOOD, small, 0, "2 loads of LL words in 2 files, each one access"),
        (SPLIT, small, 1, "a.o: dispatch: 2 x LDG.E.STRONG.SYS"),
        ("", small, 1, "no load of an LL word in 2 files"),
        (GOOD, small.replace("STACK:40", "STACK:360"), 1, "b.o: CombineSend: 360 bytes of stack > 64"),
        (GOOD, "", 1, "no DispatchSend in 2 files"),
    ):
        (tmp_path / "listing").write_text(listing)
        (tmp_path / "usage").write_text(of_kernels)
        assert main(["a.o", "b.o"]) == code
        assert said in capsys.readouterr().out
