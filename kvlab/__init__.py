"""kvlab: measurement primitives for a report on what the KV cache does to large-model inference."""

__version__ = "0.1.0"
