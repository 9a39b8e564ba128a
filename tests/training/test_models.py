import pytest
import torch

from staleflow.errors import ConfigError, RunFailed
from staleflow.training import models
from staleflow.training.algorithms import load_algorithm
from staleflow.training.models import load_model, set_attention


def test_what_a_trainer_saved_loads_as_a_model(new_model, trainer_of, tmp_path):
    for tied in (True, False):
        folder = tmp_path / str(tied)
        folder.mkdir()
        saved = new_model(tied=tied)
        trainer_of(saved).save(folder)
        loaded = load_model(str(folder))
        assert not loaded.training
        for name, tensor in saved.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_checkpoint_of_another_model_is_refused(new_model, trainer_of, tmp_path):
    trainer_of(new_model(tied=True)).save(tmp_path)
    with pytest.raises(RunFailed, match="another model"):
        trainer_of(new_model(tied=False)).load(tmp_path)


def test_the_dtype_is_the_one_asked_for(new_model, tmp_path):
    new_model().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"'int8'.*float32, bfloat16, float16"):
        load_model(str(tmp_path), dtype="int8")


def test_a_builtin_model_is_a_folder_shipped_with_the_package(new_model, tmp_path, monkeypatch):
    new_model().save_pretrained(tmp_path / "builtin" / "tiny")
    monkeypatch.setattr(models, "files", lambda package: tmp_path)
    assert load_model("builtin:tiny").config.hidden_size == 16
    with pytest.raises(ConfigError, match="no built-in model 'huge'; use one of tiny"):
        load_model("builtin:huge")


def test_an_unusable_folder_is_one_clear_sentence(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_in_several_files_load_and_a_missing_one_is_named(new_model, tmp_path):
    model = new_model(tied=True)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(str(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    shards[1].unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of its weight files, such as {shards[1].name}"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        load_model(str(tmp_path))


def test_algorithms_are_found_by_name_or_dotted_path():
    assert load_algorithm("dapo").name == "dapo"
    assert load_algorithm("staleflow.training.algorithms.dapo.DAPO") is load_algorithm("dapo")
    with pytest.raises(ConfigError, match="dapo"):
        load_algorithm("dappo")
    with pytest.raises(ConfigError, match="must be an Algorithm"):
        load_algorithm("math.pi")


def test_attention_that_cannot_be_had_is_refused() -> None:
    model = load_model("builtin:sums")
    set_attention(model, None)
    set_attention(model, "eager")
    with pytest.raises(ConfigError, match=r"training\.attention 'foo' cannot be used here"):
        set_attention(model, "foo")
