"""Prompts with images: greedy tokens equal transformers' own generation, alone, batched, in turns and after preemption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from serving_for_tests import Served, run_to_end, scheduler_for, serve
from tiny_families import by_name, difference, save_tiny
from tiny_images import FAMILIES, IMAGE, asked, picture, reference_inputs, reference_tokens, save_images
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.batching.request import Request
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.generation.generate import Engine
from engine.transformers_models.image_reader import ImageReader

NEW = 10
QUESTION = "what is it?"


@pytest.fixture(scope="module", params=others_slow(FAMILIES, "qwen3_vl_moe"))
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    """Return a model of transformers and the engine of its directory."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_images(request.param, path)
    return model, _opened(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    save_images("qwen3_vl_moe", path)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return _opened(directory)


def _opened(path: Path) -> Engine:
    engine = Engine.open(path, images=True)
    engine.end_tokens = frozenset()
    return engine


def _reference(model: Any, engine: Engine, text: str, *images: Any) -> tuple[list[int], int]:
    """Return the greedy tokens of transformers, and the length of the prompt."""
    inputs = reference_inputs(engine.checkpoint.directory, asked(text, len(images)), images)
    return reference_tokens(model, inputs, NEW), inputs["input_ids"].shape[1]


def test_greedy_equals_transformers_alone_and_in_a_batch(made: tuple[Any, Engine]) -> None:
    model, engine = made
    for images in ([picture()], [picture(1, 84, 56), picture(2)]):
        (got,) = engine.generate(QUESTION, max_new_tokens=NEW, images=images)
        tokens, length = _reference(model, engine, QUESTION, *images)
        assert (list(got.token_ids), got.prompt_tokens) == (tokens, length)
    questions = ["a", QUESTION, "b"]
    together = engine.generate(questions, max_new_tokens=NEW, images=[picture(3)])
    assert [list(each.token_ids) for each in together] == [
        _reference(model, engine, each, picture(3))[0] for each in questions
    ]


def test_logits_depend_on_the_images_and_equal_transformers(made: tuple[Any, Engine]) -> None:
    model, engine = made
    assert engine.image_reader is not None and isinstance(engine.decoder, AdaptedDecoder)
    found = {}
    for seed in (0, 1):
        prompt = engine.image_reader.prompt(QUESTION, [picture(seed)])
        cache = engine.new_cache(1, 0)
        cache.images = [prompt.inputs]
        found[seed] = engine.prefill(torch.tensor([prompt.token_ids]), None, cache)
        with torch.no_grad():
            inputs = reference_inputs(engine.checkpoint.directory, asked(QUESTION, 1), [picture(seed)])
            assert difference(found[seed], model(**inputs).logits[:, -1]) < 1e-4
    assert difference(found[0], found[1]) > 1e-3


def test_text_is_as_without_images_before_and_after_them(made: tuple[Any, Engine]) -> None:
    """Some models keep the positions of the last image in themselves."""
    model, engine = made
    ids = torch.tensor([engine.encode("def read(path):")])
    expected = reference_tokens(model, {"input_ids": ids}, NEW)
    for _ in range(2):
        assert list(engine.generate("def read(path):", max_new_tokens=NEW)[0].token_ids) == expected
        engine.generate(QUESTION, max_new_tokens=2, images=[picture()])


def _requests(engine: Engine) -> list[Request]:
    """Return requests about different images, the first two with the same tokens, and one without any."""
    assert engine.image_reader is not None
    read = [engine.image_reader.prompt(QUESTION, [each]) for each in (picture(0), picture(1), picture(2, 84, 84))]
    assert read[0].token_ids == read[1].token_ids
    prompts = [Request(tuple(ids), NEW, ignore_end_tokens=True, images=inputs) for ids, inputs in read]
    return [*prompts, Request(tuple(engine.encode("def read(path):")), NEW, ignore_end_tokens=True)]


def _alone(engine: Engine) -> list[tuple[int, ...]]:
    images = [picture(0), picture(1), picture(2, 84, 84)]
    own = [engine.generate(QUESTION, max_new_tokens=NEW, images=[each])[0].token_ids for each in images]
    return [*own, engine.generate("def read(path):", max_new_tokens=NEW)[0].token_ids]


def test_requests_in_turns_share_nothing(made: tuple[Any, Engine]) -> None:
    _, engine = made
    expected = _alone(engine)
    size = 8 * (120 * engine.cache_sizes[0] + engine.cache_sizes[1])
    together = serve(engine, *_requests(engine), *_requests(engine), kv_cache_bytes=size)
    assert [each.tokens for each in together] == expected * 2


def test_a_preempted_request_reads_its_images_again(engine: Engine) -> None:
    position, state = engine.cache_sizes
    requests = _requests(engine)
    lengths = [len(each.prompt) for each in requests]
    room = max(lengths) + NEW
    size = 8 * state + (sum(lengths) + 8) * position  # for all prompts, and hardly any answer
    scheduler = scheduler_for(engine, kv_cache_bytes=size, max_model_length=room)
    served = [Served(scheduler, engine, each, number) for number, each in enumerate(requests)]
    run_to_end(scheduler)
    assert [each.tokens for each in served] == _alone(engine)
    assert scheduler.preemptions > 0


def test_streams_skips_and_reports(directory: Path, engine: Engine) -> None:
    (whole,) = engine.generate(QUESTION, max_new_tokens=NEW, images=[picture()])
    assert "".join(engine.stream(QUESTION, max_new_tokens=NEW, images=[picture()])) == whole.text
    report, text = engine.report(), Engine.open(directory)
    assert (report.prompt_tokens, report.generated_tokens) == (whole.prompt_tokens, NEW)
    text.generate("x", max_new_tokens=2)
    assert engine.bytes_read_per_token == text.bytes_read_per_token  # the vision part is read with prompts only
    assert engine.weights_bytes > text.weights_bytes


def test_prompts_without_a_chat_template_begin_with_the_images(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    shutil.copytree(directory, path)
    (path / "chat_template.jinja").unlink()
    reader = ImageReader(path, VOCABULARY)
    ids = reader.prompt("x", [picture()]).token_ids
    assert ids[:-2] == [IMAGE] * (len(ids) - 2)
    assert reader.prompt("a<img>\nx", [picture()]).token_ids[1:] == ids
    text = reader.conversation_text([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}])
    assert text == "user: a<img>\n\nassistant:"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x<img><img>", r"image tokens in the prompt: 2 \(<img>\), for images: 1; leave that token out"),
        ("<img>y", "image tokens in the prompt: 1 .* for images: 2"),
        ("<img><img>y", "images follow each other with no text between them"),
        ("x" * 600, "make .*, and the model has 512 positions"),
    ],
)
def test_prompts_that_do_not_fit(engine: Engine, prompt: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        engine.generate(prompt, images=[picture()] * (2 if "y" in prompt else 1))


def _without_processor(path: Path) -> None:
    (path / "preprocessor_config.json").unlink()


def _of_another_class(path: Path) -> None:
    _change(path / "preprocessor_config.json", processor_class="NoSuchProcessor")


def _of_a_class_that_downloads(path: Path) -> None:
    """Give the class of another family, whose constructor asks the hub for a file of this repository."""
    wanted = {"image_processor_type": "OneFormerImageProcessor", "repo_path": "somebody/else", "class_info_file": "x.json"}
    _change(path / "preprocessor_config.json", **wanted)


def _of_a_nested_class_that_downloads(path: Path) -> None:
    (path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_processor_type": "OneFormerFast"}}))


def _of_a_processor_that_downloads(path: Path) -> None:
    _change(path / "tokenizer_config.json", processor_class="MgpstrProcessor")


def _without_vision(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["vision_config"]
    (path / "config.json").write_text(json.dumps(config))


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_without_processor, CheckpointError, "has no preprocessor_config.json, which says how images are read"),
        (
            _of_another_class,
            UnsupportedError,
            "processor_class 'NoSuchProcessor', which is not of the family 'qwen3_vl_moe'",
        ),
        (
            _of_a_class_that_downloads,
            UnsupportedError,
            "image_processor_type 'OneFormerImageProcessor', which is not of the",
        ),
        (
            _of_a_nested_class_that_downloads,
            UnsupportedError,
            "processor_config.json names image_processor_type 'OneFormerFast'",
        ),
        (_of_a_processor_that_downloads, UnsupportedError, "tokenizer_config.json names processor_class 'MgpstrProcessor'"),
        (_without_vision, UnsupportedError, "without a vision part .* reads text only"),
    ],
)
def test_models_that_read_no_images(
    damage: Any, error: type[CompressError], message: str, directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(directory, path)
    damage(path)
    with pytest.raises(error, match=message) as found:
        Engine.open(path, images=True)
    assert "\n" not in str(found.value)


def test_a_processor_that_needs_torchvision_is_refused(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(directory, path)
    _change(path / "config.json", model_type="llama4")
    _change(
        path / "preprocessor_config.json", processor_class="Llama4Processor", image_processor_type="Llama4ImageProcessor"
    )
    with pytest.raises(OptionError, match="needs the package torchvision, which is not installed: pip install torchvision"):
        ImageReader(path, VOCABULARY)


def test_tokens_of_video_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's processor says that an image's tokens are of a video, where the text opens one."""
    assert engine.images_refusal is None and engine.image_reader is not None
    made = {"input_ids": torch.tensor([[1, IMAGE, 2]]), "mm_token_type_ids": torch.tensor([[0, 2, 0]])}
    monkeypatch.setattr(engine.image_reader, "_processor", lambda **_: made)
    with pytest.raises(OptionError, match="has tokens of video or of sound"):
        engine.image_reader.read("<img>", [picture()], add_special_tokens=True)


def test_text_models_and_drafts_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'mixtral' without a vision part .* reads text only"):
        Engine.open("demo", images=True)
    save_tiny(by_name("exaone_moe"), tmp_path, vocab_size=VOCABULARY)
    add_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match="reads text only"):
        Engine.open(tmp_path).generate("x", images=[picture()])
    with pytest.raises(OptionError, match="a draft reads no images"):
        Engine.open(directory, images=True, draft=directory)


def test_a_missing_tensor_of_the_vision_part_is_named(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model"
    shutil.copytree(directory, path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "visual" in name)
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    Engine.open(path).generate("x", max_new_tokens=1)
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        Engine.open(path, images=True)


@pytest.mark.slow
def test_our_own_decoder_says_how_to_read_images(tmp_path: Path) -> None:
    save_images("qwen3_5_moe", tmp_path)
    engine = Engine.open(tmp_path)
    assert "serve --images" in str(engine.images_refusal) and str(tmp_path) not in str(engine.images_refusal)
    with pytest.raises(UnsupportedError, match="our own decoder runs this model, and it reads text only"):
        engine.generate("x", images=[picture()])
