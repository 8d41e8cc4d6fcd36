"""A real language model where its packages are: SmolLM2-135M-Instruct talks, is trained, and is patched."""

from __future__ import annotations

import asyncio

from benchmarks import smollm2
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.layering import load
from echo2p2p.parts import load_policy
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.weights.patch import apply, encode

GREEDY = Sampling(temperature=0.0, max_new_tokens=10)

if not smollm2.missing():

    async def test_a_real_policy_answers_and_its_next_version_arrives_as_a_patch():
        folder = smollm2.policy()
        tokenizer = PolicyTokenizer(folder, chat_template=True)
        settings = load(overrides=(*smollm2.SETTINGS, f"policy.path={folder}", "learner.threads=1"))
        _, scorer, trainer, engine = load_policy(settings, None)
        try:
            base = trainer.snapshot()
            await engine.install(base, 0)
            asked = tokenizer.encode_prompt("What is the capital of France?")
            [[answer]] = await engine.generate([asked], n_samples=1, sampling=GREEDY, seed=0)
            assert "Paris" in tokenizer.decode_completion(answer.tokens)

            groups = await roll_out(
                engine,
                scorer,
                range(2),
                n_samples=6,
                sampling=Sampling(max_new_tokens=6),
                seed=0,
                offload=asyncio.to_thread,
            )
            done = trainer.train(groups)
            assert done.skipped == ""
            # The engine computes in bfloat16, the learner in float32: nothing else lies between them.
            assert done.mismatch_kl < 0.01

            new = trainer.snapshot()
            patch = encode(base, new)
            assert len(patch) < len(new.data) / 20
            await (await engine.stage(apply(base, patch, layout=new.layout), 1))()
            assert await engine.fingerprint() == new.fingerprint()
        finally:
            await engine.close()
