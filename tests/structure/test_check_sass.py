"""check_sass.py on small listings: a kernel that obeys its rule, and ones that break it."""

from check_sass import loads, main, problems

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


def test_the_command(tmp_path, monkeypatch, capsys):
    disassembler = tmp_path / "cuobjdump"
    disassembler.write_text(f"#!/bin/sh\ncat '{tmp_path}/listing'\n")
    disassembler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for listing, code, said in (
        (GOOD, 0, "2 loads of LL words in 2 files, each one access"),
        (SPLIT, 1, "a.o: dispatch: 2 x LDG.E.STRONG.SYS"),
        ("", 1, "no load of an LL word in 2 files"),
    ):
        (tmp_path / "listing").write_text(listing)
        assert main(["a.o", "b.o"]) == code
        assert said in capsys.readouterr().out
