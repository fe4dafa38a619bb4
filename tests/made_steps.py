"""Made-up measurements that look like real steps, for tests of figures: no torch, no simulation."""

from __future__ import annotations

from memlab.instruments.measurement import CATEGORIES, Measurement, Sample

MB = 1_000_000


def made_step(
    *,
    layers: int = 28,
    micro_batches: int = 1,
    checkpointing: bool = False,
    logits_mb: int = 2490,
    batch: int = 4,
    reserved: bool = True,
) -> Measurement:
    """A step shaped like Qwen3-0.6B's: bytes climb by layers, spike at the loss, fall again."""
    live = dict.fromkeys(CATEGORIES, 0)
    live |= {"parameters": 1192 * MB, "optimizer_state": 2384 * MB}
    samples: list[Sample] = []

    def at(phase: str) -> None:
        samples.append(Sample(40 * len(samples), phase, tuple(live[c] for c in CATEGORIES)))

    kept = (10 if checkpointing else 312) * MB * batch // 4
    inside = 312 * MB * batch // 4
    at("forward")
    for _ in range(micro_batches):
        for _ in range(layers):
            live["temporaries"] = 60 * MB
            at("forward")
            live["temporaries"] = 0
            live["activations"] += kept
            at("forward")
        live["logits"] = logits_mb * MB
        at("forward")
        live["temporaries"] = logits_mb * MB * 2
        at("forward")
        live["temporaries"] = logits_mb * MB
        at("backward")
        live["logits"] = live["temporaries"] = 0
        for _ in range(layers):
            if checkpointing:
                live["activations"] += inside
                at("forward")
                at("backward")
                live["activations"] -= inside
            live["gradients"] = min(live["gradients"] + 1192 * MB // layers, 1192 * MB)
            live["activations"] -= kept
            at("backward")
        live["activations"] = 0
    for _ in range(6):
        at("optimizer")
    live["gradients"] = 0
    at("optimizer")
    peak = max(samples, key=lambda s: s.total)
    return Measurement(
        metered_peak_bytes=peak.total,
        peak_allocated_bytes=peak.total + 67_108_864,
        peak_reserved_bytes=int(peak.total * 1.07) if reserved else None,
        by_category=dict(zip(CATEGORIES, peak.bytes, strict=True)),
        by_op={"made": peak.total},
        timeline=tuple(samples),
        host_peak_bytes=0,
        step_ms=None,
        device="simulated GPU",
        simulated=True,
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
    )
