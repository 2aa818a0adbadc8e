import os
import subprocess
import sys

import pytest

import jkv
from jkv import cli
from jkv.cli import main


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_names_every_verb(run_jkv, argv):
    shown = run_jkv(*argv)
    assert [verb for verb in cli.VERBS if f"  {verb} " not in shown] == []


def test_the_version_is_printed(run_jkv):
    assert run_jkv("--version") == f"jkv {jkv.__version__}\n"


def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "jkv", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"jkv {jkv.__version__}\n"


def test_an_unknown_verb_is_refused_with_the_nearest(refusal):
    assert refusal("genrate") == "jkv: 'genrate' is not a verb (did you mean \"generate\"?)"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(capsys, verb):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: jkv {verb}" in capsys.readouterr().out


def test_a_wrong_flag_value_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--model", "x", "--prompt", "y", "--max-new-tokens", "many"])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert main(["generate"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_is_gone_is_quiet():
    code = (
        "import sys, types; from jkv import cli; line = print\n"
        "verb = types.SimpleNamespace(run=lambda argv: [line('x' * 100) for _ in range(10**5)])\n"
        "cli.importlib.import_module = lambda name: verb; sys.exit(cli.main(['inspect']))"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait() == 141


def test_programs_are_kept_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("JKV_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    main(["tokenize", "--model", "none", "--text", "x"])
    assert os.environ.pop("JAX_COMPILATION_CACHE_DIR") == str(tmp_path)
    assert float(os.environ.pop("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")) < 1
