"""check_sass.py on small listings: a kernel that obeys its rule, and ones that break it."""

from check_sass import (
    MOST_MOVES,
    MOST_STACK,
    loads,
    main,
    move_problems,
    moves,
    problems,
    stack_problems,
    stacks,
    unpack_problems,
)

GOOD = """
	Function : one_shot
        /*0030*/                   LDG.E.128.STRONG.SYS R4, desc[UR4][R2.64] ;
        /*0040*/                   LD.E.64.STRONG.SYS R8, desc[UR4][R6.64] ;
        /*0050*/                   LDG.E R9, desc[UR4][R6.64] ;
        /*0060*/                   LDG.E.64.STRONG.GPU R9, desc[UR4][R6.64] ;
	Function : product
        /*0030*/                   ULOP3.LUT UR18, UR9, 0x10002, URZ, 0xfc, !UPT ;
        /*0040*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], RZ, !UPT ;
        /*0050*/              @!P0 R2UR UR8, R206 ;
        /*0060*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24 ;
        /*0070*/                   R2UR UR4, R2 ;
"""
MOVES = GOOD.replace(
    "        /*0050*/              @!P0 R2UR UR8, R206 ;\n",
    "        /*0050*/              R2UR UR8, R206 ;\n" * (MOST_MOVES + 1),
)
SPLIT = (
    GOOD
    + """
	Function : dispatch
        /*0030*/                   LDG.E.STRONG.SYS R7, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.STRONG.SYS R9, desc[UR4][R2.64+0xc] ;
"""
)


RARE = "_ZN48_INTERNAL_619fc865_16_comm_kernels_cpp_619fc8657moe_a2a9cuda_bare11look_aroundERKNS0_10WaitPolicyE"
LAMBDA = "_ZZN7moe_a2a9cuda_bare10BothHalvesINS0_11CombineSendEE3runERKS3_PSt4byteENKUlT_E_clISt13type_identityINS0_7RowWireEEEEDaSF_"


def test_words_in_one_access():
    assert problems(loads(GOOD)) == []


def test_a_word_in_two_accesses():
    assert problems(loads(SPLIT)) == [
        "dispatch: 2 x LDG.E.STRONG.SYS, part of an LL word; LDG.E.128.STRONG.SYS expected"
    ]


def test_operands_described_by_each_lane():
    assert moves(GOOD) == {"product": 1}
    assert move_problems(moves(GOOD)) == []
    assert move_problems(moves(MOVES)) == [
        "product: 5 moves to uniform registers among its products > 4; is the warp's number broadcast?"
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
    instances = usage(CodedTwoShot=80) + usage(CodedTwoShot=368) + usage(CodedTwoShot=80)
    assert stacks(instances.replace("CodedTwoShotE", "CodedTwoShotILNS_9LineCodecE4EEE")) == {"CodedTwoShot": 368}
    assert stack_problems({"DispatchSend": 64, "Dispatch": 128}) == []
    assert stack_problems({"DispatchSend": 360}) == [
        "DispatchSend: 360 bytes of stack > 64; which object does a call take by reference?"
    ]


def test_the_command(tmp_path, monkeypatch, capsys):
    disassembler = tmp_path / "cuobjdump"
    disassembler.write_text(f"#!/bin/sh\ncat '{tmp_path}'/$1\n")
    disassembler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    small = usage(**dict.fromkeys(MOST_STACK, 40))
    symbols = "FUNC          LOCAL   DEFAULT    -               $_ZN7moe_a2a12kernel_entry$"
    for listing, of_kernels, called, code, said in (
        (GOOD, small, RARE, 0, "2 loads of LL words, each one access; 2 loops of products (2 files)"),
        (MOVES, small, RARE, 1, "b.o: product: 5 moves to uniform registers"),
        (GOOD.replace("GMMA", "MMA"), small, RARE, 1, "no product of a warp group in 2 files"),
        (SPLIT, small, RARE, 1, "a.o: dispatch: 2 x LDG.E.STRONG.SYS"),
        ("", small, RARE, 1, "no load of an LL word in 2 files"),
        (GOOD, small.replace("STACK:40", "STACK:360"), RARE, 1, "b.o: CombineSend: 360 bytes of stack > 64"),
        (GOOD, "", RARE, 1, "no DispatchSend in 2 files"),
        (GOOD, small, LAMBDA, 1, f"a.o: {LAMBDA}: a lambda that is called"),
    ):
        (tmp_path / "-sass").write_text(listing)
        (tmp_path / "-res-usage").write_text(of_kernels)
        (tmp_path / "-symbols").write_text(f"{symbols}{called}\n")
        assert main(["a.o", "b.o"]) == code
        assert said in capsys.readouterr().out


def test_float8_from_a_register_of_four():
    pairs = """
	Function : codec
        /*0010*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R6, R11, R10, RZ ;
        /*0020*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R7, R20, R19, R6 ;
        /*0030*/                   F2FP.F16.E4M3.UNPACK_B R9, R6 ;
        /*0040*/                   IMAD.MOV.U32 R8, RZ, RZ, R7 ;
        /*0050*/                   LOP3.LUT R7, R7, 0xff, RZ, 0xc0, !PT ;
        /*0060*/                   F2FP.F16.E4M3.UNPACK_B R9, R7 ;
"""
    assert unpack_problems(pairs) == []
    broken = pairs + "        /*0070*/                   F2FP.F16.E4M3.UNPACK_B R18, R8 ;\n"
    assert unpack_problems(broken) == ["codec: 1 x float8 from a register of four, see line_codec.h"]
