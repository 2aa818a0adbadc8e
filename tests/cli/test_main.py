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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "--temperature", "abc"), "--temperature: must be a number, got 'abc'"),
        (("generate", "--max-new-tokens", "1.5"), "--max-new-tokens: must be a whole number, got '1.5'"),
        (("generate", "--stop-token-ids", "x"), "--stop-token-ids: must be whole numbers and so on, got 'x'"),
        (("generate", "--temperature"), "--temperature: must be followed by a value"),
        (
            ("generate", "--attention", "xlb"),
            "--attention: must be auto or pallas_gpu or pallas_tpu or reference or xla, got 'xlb'",
        ),
        (("generate", "--temprature", "1"), '--temprature: is not a flag (did you mean "--temperature"?)'),
        (("bench", "decode", "--steps", "x"), "--steps: must be a whole number, got 'x'"),
        (("bench", "speed"), "what: must be decode, got 'speed'"),
        (("tokenize", "--model", "x"), "--text: is missing; --help describes it"),
        (
            ("tokenize", "--model", "x", "--text", "y", "--jsn"),
            '--jsn: is not a flag (did you mean "--json"?)',
        ),
        (("check",), "config: is missing; --help describes it"),
        (("bench",), "what: is missing; --help describes it"),
        (("check", "smollm2-cpu", "--mech", "x"), '--mech: is not a flag (did you mean "--mesh"?)'),
    ],
)
def test_a_wrong_flag_is_told_in_one_sentence(refusal, argv, message):
    said = refusal(*argv)
    assert said.startswith(f"jkv: command line: {message}")
    assert "None" not in said


def test_every_wrong_flag_is_told_at_once(capsys):
    assert main(["tokenize", "--model", "x", "--txt", "y"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "jkv: command line: --text: is missing; --help describes it",
        'jkv: command line: --txt: is not a flag (did you mean "--text"?)',
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            "Out of memory allocating 9 bytes",
        ),
        (MemoryError("Unable to allocate 1. TiB"), "Unable to allocate 1. TiB"),
    ],
)
def test_a_memory_that_is_too_small_is_told_in_one_line(monkeypatch, refusal, error, message):
    def fail(argv):
        raise error

    monkeypatch.setattr("jkv.cli.inspect.run", fail)
    assert message in refusal("inspect")


def test_another_error_of_the_runtime_is_not_hidden(monkeypatch):
    def fail(argv):
        raise RuntimeError("INTERNAL: x")

    monkeypatch.setattr("jkv.cli.inspect.run", fail)
    with pytest.raises(RuntimeError, match="INTERNAL"):
        main(["inspect"])


def test_what_standard_output_cannot_hold_is_escaped():
    code = (
        "import sys, types; from jkv import cli\n"
        "verb = types.SimpleNamespace(run=lambda argv: print('a\\u00e9\\U0001f600b'))\n"
        "cli.importlib.import_module = lambda name: verb; sys.exit(cli.main(['inspect']))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "JKV_CACHE": "off"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert result.stdout == b"a\\xe9\\U0001f600b\n"


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


def test_a_folder_that_cannot_keep_programs_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("JKV_CACHE", str(file))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    main(["tokenize", "--model", "none", "--text", "x"])
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"jkv: compiled programs cannot be kept in {file} (File exists); set JKV_CACHE")
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_devices_of_a_cpu_have_threads_beside_those_that_wait(monkeypatch):
    """XLA has $NPROC threads; with eight, eight devices of SmolLM2 wait for each other forever."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.delenv("NPROC", raising=False)
    main(["tokenize", "--model", "none", "--text", "x"])
    assert int(os.environ.pop("NPROC")) > 8
    monkeypatch.setenv("NPROC", "9")
    main(["tokenize", "--model", "none", "--text", "x"])
    assert os.environ["NPROC"] == "9"
