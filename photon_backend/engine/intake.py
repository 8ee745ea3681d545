"""From a Submit to a Sequence, or a refusal. Pure Python.

The front end has checked what a user can get wrong; what is checked here is what only the engine knows (context, pages)
and what would corrupt a batch if a front end sent nonsense.
"""

from __future__ import annotations

from photon_backend.engine.sequence import Sequence
from photon_backend.grammar.spatial import program_of
from photon_backend.model.config import ModelConfig
from photon_backend.protocol import REQUEST_ID_BYTES, PhotonError, Submit


def sequence_of(client: bytes, request: Submit, config: ModelConfig, now: float) -> Sequence:
    """Raises PhotonError INVALID_ARG with the numbers when the prompt does not fit the context."""
    _check(request, config)
    prefix_len = config.prefix_len if request.digest is not None else 0
    prompt_len = prefix_len + len(request.prompt_ids)
    room = config.text.max_context - prompt_len
    program = program_of(request, room)
    if program.limit < 1:
        raise PhotonError(
            "INVALID_ARG",
            f"text_input: the prompt has {prompt_len} tokens, picture included, and the model's context holds "
            f"{config.text.max_context} with the answer",
        )
    return Sequence(
        client=client,
        request=request,
        program=program,
        prefix_len=prefix_len,
        prompt_len=prompt_len,
        limit=program.limit,
        arrival=now,
        deadline=now + request.max_time_ms / 1e3 if request.max_time_ms > 0 else float("inf"),
        answering=not request.reasoning,
    )


def _check(request: Submit, config: ModelConfig) -> None:
    ids, sampling, special = request.prompt_ids, request.sampling, config.tokenizer
    name = request.request_id
    wrong = [
        ("request_id", not (0 < len(name) <= REQUEST_ID_BYTES and name.isascii() and name.isprintable())),
        ("prompt_ids", not ids or min(ids) < 0 or max(ids) >= config.text.vocab_size),
        ("coords", ids.count(special.coord_id) != len(request.coords)),
        ("sizes", ids.count(special.size_id) != len(request.sizes)),
        ("digest", request.digest is not None and len(request.digest) != 16),
        ("max_tokens", sampling.max_tokens < 1),
        ("max_objects", request.max_objects < 1),
        ("temperature", not sampling.temperature >= 0),
        ("top_p", not 0 < sampling.top_p <= 1),
        ("top_k", sampling.top_k < 0),
        ("seed", not 0 <= sampling.seed < 2**63),
    ]
    for field, bad in wrong:
        if bad:
            raise PhotonError("INVALID_ARG", f"{field}: the front end sent a value that the engine cannot use")
