"""What a row of the transformers sweep is made from: a class, a tiny config, and inputs of one kind."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: small sizes under the names that most configs share; a config ignores what it doesn't know
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: an encoder and a decoder under the names of BART and its kin
SEQ2SEQ = TINY | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
#: a vision transformer on 32 × 32 pixels
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
#: what can't be built or run in float either
NOT_RUN = {"dinat": "needs the package natten"}


class Case(NamedTuple):
    """A model type: the class to build, the kind of inputs that it takes, and its config's keywords.

    unreached: patterns of layers that no inference calls (heads for training only, adapters of other blocks), which
    the user has to leave out of a static scheme, as the error says.
    """

    model: str
    inputs: str
    config: dict[str, Any]
    unreached: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """A new model; attention in plain matmuls, whose numbers don't depend on which kernel torch picks."""
        import transformers  # here, so that the tables can be read without it

        model = getattr(transformers, self.model)
        config = model.config_class(**self.config)
        config._attn_implementation = "eager"
        if "experts_implementation" in self.config:
            config._experts_implementation = self.config["experts_implementation"]
        return model(config)

    def run(self, model: nn.Module) -> Any:
        """Its output of the inputs, which are the same every time."""
        return model(**INPUTS[self.inputs]())


def tiny(model: str, inputs: str = "text", *, unreached: tuple[str, ...] = (), **config: Any) -> Case:
    """A text model: TINY with these changes."""
    return Case(model, inputs, TINY | config, unreached)


def seq2seq(model: str, inputs: str = "seq2seq", **config: Any) -> Case:
    """A text model with an encoder and a decoder: SEQ2SEQ with these changes."""
    return Case(model, inputs, SEQ2SEQ | config)


def vision(model: str, inputs: str = "image", *, unreached: tuple[str, ...] = (), **config: Any) -> Case:
    """A vision transformer: VISION with these changes."""
    return Case(model, inputs, VISION | config, unreached)


# --- inputs ---
def ids(*shape: int, low: int = 5, high: int = 90, seed: int = 0) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, such as pixels."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def waves(n: int) -> Tensor:
    """Two sounds of n samples."""
    time = torch.arange(n) / 16000
    return torch.stack([(math.tau * f * time).sin() for f in (220.0, 330.0)]) + 0.1 * floats(2, n)


def first(*shape: int) -> Tensor:
    """A mask that is 1 at the first token."""
    mask = torch.zeros(shape, dtype=torch.long)
    mask[:, 0] = 1
    return mask


def types(count: int, length: int = 24) -> Tensor:
    """1 where `with_image` puts a token for an image."""
    found = torch.zeros(2, length, dtype=torch.long)
    found[:, 2 : 2 + count] = 1
    return found


def with_image(count: int, token: int = 98, length: int = 24, **more: Tensor) -> dict[str, Any]:
    """Two texts, each with `count` tokens that stand for an image."""
    text = ids(2, length)
    text[:, 2 : 2 + count] = token
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "use_cache": False, **more}


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: {"input_ids": ids(2, 24), "use_cache": False},
    "long": lambda: {"input_ids": ids(4, 32), "use_cache": False},
    "encoder": lambda: {"input_ids": ids(2, 24), "attention_mask": torch.ones(2, 24, dtype=torch.long)},
    "ids short": lambda: {"input_ids": ids(1, 8)},
    "ids": lambda: {"input_ids": ids(2, 24)},
    "seq2seq": lambda: {"input_ids": ids(2, 24), "decoder_input_ids": ids(2, 10, seed=1), "use_cache": False},
    "global": lambda: {"input_ids": ids(2, 24), "global_attention_mask": first(2, 24)},
    "global seq2seq": lambda: {**INPUTS["seq2seq"](), "global_attention_mask": first(2, 24)},
    "entities": lambda: {
        "input_ids": ids(2, 24),
        "entity_ids": ids(2, 3, low=1, high=20),
        "entity_position_ids": ids(2, 3, 4, low=1, high=24),
        "entity_attention_mask": torch.ones(2, 3, dtype=torch.long),
    },
    "boxes": lambda: {"input_ids": ids(2, 24), "bbox": ids(2, 24, 2).repeat(1, 1, 2)},
    "image": lambda: {"pixel_values": floats(2, 3, 32, 32)},
    "image64": lambda: {"pixel_values": floats(2, 3, 64, 64)},
    "image states": lambda: {"pixel_values": floats(2, 3, 32, 32), "output_hidden_states": True},
    "image64 states": lambda: {"pixel_values": floats(2, 3, 64, 64), "output_hidden_states": True},
    "video": lambda: {"pixel_values": floats(1, 4, 3, 32, 32)},
    "video only": lambda: {"pixel_values_videos": floats(1, 4, 3, 32, 32)},
    "patches": lambda: {
        "pixel_values": floats(2, 16, 192),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.full((2, 2), 4),
    },
    "points64": lambda: {
        "pixel_values": floats(1, 3, 64, 64),
        "input_points": 30 + 10 * floats(1, 2, 2, 2),
        "input_masks": floats(1, 1, 32, 32),
    },
    "features20": lambda: {"input_features": floats(2, 64, 16)},
    "clap": lambda: {"input_ids": ids(2, 16), "input_features": floats(2, 1, 256, 16)},
    "vocoder": lambda: {"input_features": floats(1, 10, 16), "noise_sequence": floats(1, 10, 8)},
    "features": lambda: {"input_features": floats(2, 20, 16)},
    "spectrogram": lambda: {"input_values": floats(2, 24, 16)},
    "whisper": lambda: {"input_features": floats(2, 16, 40), "decoder_input_ids": ids(2, 10), "use_cache": False},
    "moonshine": lambda: {"input_values": waves(4000), "decoder_input_ids": ids(2, 10), "use_cache": False},
    "speech": lambda: {"input_features": floats(2, 40, 16), "decoder_input_ids": ids(2, 10), "use_cache": False},
    "speecht5": lambda: {"input_values": waves(2000), "decoder_input_ids": ids(2, 10), "use_cache": False},
    "codec": lambda: {"input_values": waves(320)[:, None]},
    "codes": lambda: {"input_ids": ids(8, 12, high=60), "encoder_hidden_states": floats(2, 6, 32), "use_cache": False},
    "vits": lambda: {"input_ids": ids(1, 12, low=1, high=30)},
    "series": lambda: {
        "past_values": floats(2, 10),
        "past_time_features": floats(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": floats(2, 4, seed=1),
        "future_time_features": floats(2, 4, 1, seed=1),
        "use_cache": False,
    },
    "past": lambda: {"past_values": floats(2, 32, 2)},
    "timesfm": lambda: {"past_values": [floats(32), floats(24)], "freq": torch.zeros(2, 1, dtype=torch.long)},
    "trajectory": lambda: {
        "states": floats(1, 6, 5),
        "actions": floats(1, 6, 3),
        "rewards": floats(1, 6, 1),
        "returns_to_go": floats(1, 6, 1),
        "timesteps": torch.arange(6)[None],
        "attention_mask": torch.ones(1, 6),
    },
    "sound": lambda: {"input_values": waves(2000)},
    "clip patches": lambda: {"input_ids": ids(2, 16), **INPUTS["patches"]()},
    "clip video": lambda: {"input_ids": ids(2, 16), "pixel_values": floats(2, 2, 3, 32, 32)},
    "owl": lambda: {
        "input_ids": ids(4, 16),
        "attention_mask": torch.ones(4, 16).long(),
        "pixel_values": floats(2, 3, 32, 32),
    },
    "image tokens 4": lambda: with_image(4, pixel_values=floats(2, 3, 32, 32)),
    "image tokens 16": lambda: with_image(16, pixel_values=floats(2, 3, 32, 32)),
    "images tokens 4": lambda: with_image(4, pixel_values=floats(2, 1, 3, 32, 32)),
    "image sizes": lambda: with_image(4, pixel_values=floats(2, 3, 32, 32), image_sizes=torch.full((2, 2), 32)),
    "llava next": lambda: with_image(
        36, length=48, pixel_values=floats(2, 2, 3, 32, 32), image_sizes=torch.full((2, 2), 32)
    ),
    "instructblip": lambda: with_image(4, pixel_values=floats(2, 3, 32, 32), qformer_input_ids=ids(2, 8)),
    "qwen vl": lambda: with_image(
        16, pixel_values=floats(128, 96), image_grid_thw=torch.tensor([[1, 8, 8]] * 2), mm_token_type_ids=types(16)
    ),
    "idefics": lambda: {
        **INPUTS["encoder"](),
        "pixel_values": floats(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, 24, 1).long(),
        "use_cache": False,
    },
    "got": lambda: with_image(4, pixel_values=floats(2, 3, 128, 128)),
    "mllama": lambda: with_image(
        1,
        pixel_values=floats(2, 1, 2, 3, 32, 32),
        aspect_ratio_ids=torch.ones(2, 1).long(),
        aspect_ratio_mask=torch.ones(2, 1, 2).long(),
        cross_attention_mask=torch.ones(2, 24, 1, 2).long(),
    ),
    "fuyu": lambda: with_image(4, image_patches=floats(2, 4, 48)),
    "kosmos": lambda: with_image(4, pixel_values=floats(2, 3, 32, 32), image_embeds_position_mask=types(4)),
    "florence": lambda: with_image(5, pixel_values=floats(2, 3, 64, 64), decoder_input_ids=ids(2, 10)),
    "pix2struct": lambda: {"flattened_patches": 1 + floats(2, 16, 50).abs(), "decoder_input_ids": ids(2, 10)},
    "image to text": lambda: {
        "pixel_values": floats(2, 3, 32, 32),
        "decoder_input_ids": ids(2, 10),
        "use_cache": False,
    },
    "regions": lambda: {"input_ids": ids(2, 24), "visual_embeds": floats(2, 6, 16)},
    "lxmert": lambda: {"input_ids": ids(2, 24), "visual_feats": floats(2, 6, 16), "visual_pos": floats(2, 6, 4)},
    "layoutlmv3": lambda: {**INPUTS["boxes"](), "pixel_values": floats(2, 3, 32, 32)},
    "qwen audio": lambda: with_image(
        10, input_features=floats(2, 16, 40), feature_attention_mask=torch.ones(2, 40).long()
    ),
    "voxtral": lambda: with_image(5, input_features=floats(2, 16, 40)),
    "grounding": lambda: {**INPUTS["encoder"](), "pixel_values": floats(2, 3, 64, 64)},
    "clip": lambda: {"input_ids": ids(2, 16), "pixel_values": floats(2, 3, 32, 32)},
}
