"""Sample values of each setting, in the notation of each source."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from app.core.settings import AdapterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """word: text on the command line and in the environment. toml: text in a file."""

    word: str
    toml: str
    value: Any


def sample(word: str, toml: str, value: Any) -> Sample:
    return Sample(word=word, toml=toml, value=value)


# both values, so that a test also changes a default of true
ON, OFF = sample("yes", "true", True), sample("no", "false", False)

SAMPLES: Mapping[str, tuple[Sample, ...]] = {
    "installed": (ON, OFF),
    "pull": (ON, OFF),
    "runner": (sample("thread", '"thread"', "thread"), sample("process", '"process"', "process")),
    "keep_alive": (
        sample("5m", '"5m"', 300.0),
        sample("forever", '"forever"', inf),
        sample("-1", "-1", inf),
        sample("0", "0", 0.0),
        sample("1h30m", "5400", 5400.0),
    ),
    "max_loaded": (sample("2", "2", 2),),
    "load_timeout": (sample("90", "90", 90.0), sample("2m", '"2m"', 120.0)),
    "load_wait": (sample("0", "0", 0.0), sample("1.5", "1.5", 1.5)),
    "host": (sample("::1", '"::1"', "::1"), sample("0.0.0.0", '"0.0.0.0"', "0.0.0.0")),
    "port": (sample("0", "0", 0), sample("65535", "65535", 65535)),
    "tls_cert": (sample("cert.pem", '"cert.pem"', "cert.pem"),),
    "tls_key": (sample("key.pem", '"key.pem"', "key.pem"),),
    "api_keys": (sample("keys.toml", '"keys.toml"', "keys.toml"),),
    "allow_anyone": (ON, OFF),
    "allowed_hosts": (
        sample("a.example, .b.example", '["a.example", ".b.example"]', ("a.example", ".b.example")),
        sample("a.example", '["a.example"]', ("a.example",)),
    ),
    "cors_origins": (
        sample("https://a", '["https://a"]', ("https://a",)),
        sample("https://a:1,app://b", '["https://a:1", "app://b"]', ("https://a:1", "app://b")),
    ),
    "quantize": (sample("4", "4", 4), sample("8", "8", 8)),
    "adapters": (
        sample(
            "a=/x, b-2=/y",
            '["a=/x", "b-2=/y"]',
            (AdapterSettings(name="a", path="/x"), AdapterSettings(name="b-2", path="/y")),
        ),
    ),
    "vision": (OFF, ON),
    "image_tokens": (sample("256", "256", 256), sample("1k", '"1k"', 1000)),
    "image_hosts": (
        sample("a.example, b.example", '["a.example", "b.example"]', ("a.example", "b.example")),
    ),
    "kv": (sample("float32", '"float32"', "float32"), sample("auto", '"auto"', "auto")),
    "activations": (sample("auto", '"auto"', "auto"), sample("8", "8", 8)),
    "kv_layout": (sample("rows", '"rows"', "rows"), sample("slab", '"slab"', "slab")),
    "experimental_metal": (ON, OFF),
    "parallel": (sample("3", "3", 3),),
    "context": (sample("2048", "2048", 2048),),
    "context_shift": (ON, OFF),
    "memory": (sample("6.5", "6.5", 13 << 29), sample("6", "6", 6 << 30)),
    "cache": (sample("slots", '"slots"', "slots"), sample("radix", '"radix"', "radix")),
    "multi_user": (ON, OFF),
    "exact": (ON, OFF),
    "prefill_chunk": (sample("64", "64", 64),),
    "keep_awake": (ON, OFF),
    "watchdog": (sample("2.5", "2.5", 2.5),),
    "max_queue": (sample("0", "0", 0), sample("7", "7", 7)),
    "max_per_key": (sample("2", "2", 2),),
    "max_tokens": (sample("100", "100", 100),),
    "max_logprobs": (sample("100", "100", 100), sample("-1", "-1", -1)),
    "max_time": (sample("500ms", '"500ms"', 0.5),),
    "deadline": (sample("10m", "600", 600.0),),
    "max_body": (sample("2", "2", 2 << 20), sample("0.5", "0.5", 1 << 19)),
    "max_connections": (sample("9", "9", 9),),
    "header_timeout": (sample("3", "3", 3.0),),
    "body_timeout": (sample("3", "3", 3.0),),
    "drain": (sample("0", "0", 0.0), sample("1m", "60", 60.0)),
    "ping": (sample("0.5", "0.5", 0.5),),
    "strict_fields": (ON, OFF),
    "reasoning_field": (
        sample("reasoning", '"reasoning"', "reasoning"),
        sample("both", '"both"', "both"),
    ),
    "log_format": (sample("json", '"json"', "json"), sample("human", '"human"', "human")),
    "log_level": (sample("error", '"error"', "error"), sample("debug", '"debug"', "debug")),
    "access_log": (OFF, ON),
    "otlp": (sample("http://localhost:4318", '"http://localhost:4318"', "http://localhost:4318"),),
    "debug": (ON, OFF),
}

# other fields of Settings that a setting requires
COMPANIONS: Mapping[str, Mapping[str, str]] = {
    "context_shift": {"cache": "slots"},
    "multi_user": {"cache": "slots"},
    "tls_cert": {"tls_key": "key.pem"},
    "tls_key": {"tls_cert": "cert.pem"},
}
