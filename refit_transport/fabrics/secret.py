"""A session's secret, and how two ends prove to each other that they know it, without telling it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any, Self

NONCE_BYTES = 32


def new_nonce() -> str:
    """A number that nobody has used or can foresee, as hexadecimal text."""
    return secrets.token_hex(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Secret:
    """Handed out by the control plane to the ranks of one session; its text is shown by `text` alone.

    >>> Secret("5ec2e7")
    Secret()
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a session's secret can't be empty")

    @classmethod
    def new(cls) -> Self:
        """A secret that nobody else has."""
        return cls(secrets.token_hex(32))

    def proof(self, side: str, *facts: Any) -> str:
        """What only somebody who knows the secret can say about these facts, for one `side` of a connection."""
        text = "\0".join((side, *map(str, facts)))
        # JSON may bring half a surrogate pair, which no strict encoding takes.
        return hmac.new(self.text.encode(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    def accepts(self, proof: Any, side: str, *facts: Any) -> bool:
        """Whether `proof` is what the other side would have said."""
        expected = self.proof(side, *facts)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)
