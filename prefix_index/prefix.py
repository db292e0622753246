"""A prefix: what a sequence begins with, as the public API takes it, and its blocks as symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np

from kvstrata.core.errors import MisuseError
from kvstrata.core.keys import KEY_BYTES
from kvstrata.prefix_index.tokens import TOKEN_BYTES, TokenIds, token_ids

Extra = Mapping[int, bytes | None]
"""Block number -> what else decides that block's KV (media ids); None or b"" = not known."""

_EXTRA_TAG = b"kvstrata/extra"
_HASH_WORDS = KEY_BYTES // TOKEN_BYTES
# Tokens that a digest of 256 bits takes the place of, so the smallest block that can have extra.


class Symbols(NamedTuple):
    """A run of full blocks in the form that the index compares: bytes of a fixed width."""

    root: bytes
    """The 32-byte key that the chain starts from: namespace, salt, LoRA, epoch."""
    width: int
    """Bytes a symbol: 4 * block_size for token ids, 32 for an engine's own hashes."""
    data: bytes
    """``width`` bytes a block, full blocks only."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the run."""
        return len(self.data) // self.width


class Prefix:
    """The tokens (or an engine's block hashes) of a sequence, with what else identifies their KV.

    Immutable: the tokens are copied at construction. Equal prefixes name equal blocks. ``salt`` and
    ``lora`` go into the root key, which whoever knows the namespace computes
    (``kvstrata.core.keys.root_key``); ``extra`` goes into the blocks that it belongs to.
    """

    __slots__ = ("_cache", "_words", "extra", "hashed", "lora", "salt")

    def __init__(
        self, words: TokenIds, salt: bytes, lora: bytes | None, extra: Extra, hashed: bool
    ) -> None:
        """For internal use: ``from_tokens`` and ``from_hashes`` check their arguments."""
        self._words = words
        self.salt = salt
        self.lora = lora
        """Content id of the adapter; None without one."""
        self.extra = extra
        self.hashed = hashed
        """True for ``from_hashes``: such a prefix shares nothing with one made of tokens."""
        self._cache: tuple[int | None, int, bytes] = (None, 0, b"")  # block size, width, data

    @classmethod
    def from_tokens(
        cls,
        tokens: Any,
        salt: bytes = b"",
        lora: bytes | str | None = None,
        extra: Extra | None = None,
    ) -> Prefix:
        """A prefix of token ids, 0 <= id < 2**31.

        ``tokens``: a one-dimensional numpy array, torch tensor or array.array of whole numbers of
        any width (shape (1, n) is taken too), or a sequence of ints. ``salt`` separates users who
        may not share, ``lora`` is the content id of the adapter. ``extra[b]`` identifies what block
        b holds beside its tokens, such as an image; None or b"" says that this is not known, and
        nothing from block b on is cached. MisuseError for anything else.
        """
        return cls(token_ids(tokens), _salt(salt), _lora(lora), _extra(extra), hashed=False)

    @classmethod
    def from_hashes(
        cls,
        hashes: bytes | Sequence[bytes],
        salt: bytes = b"",
        lora: bytes | str | None = None,
    ) -> Prefix:
        """A prefix of an engine's own block hashes, 32 bytes each, one per full block.

        ``hashes`` is a sequence of them or all of them joined. MisuseError for any other length: a
        shorter hash can be made to collide, and a collision would serve another user's KV.
        """
        return cls(_hash_words(hashes), _salt(salt), _lora(lora), {}, hashed=True)

    @property
    def num_tokens(self) -> int | None:
        """Tokens, those of a partial last block counted; None for a prefix of hashes."""
        return None if self.hashed else len(self._words)

    @property
    def cacheable(self) -> bool:
        """False where some ``extra`` is not known: then ``symbols`` ends before that block."""
        return all(self.extra.values())

    def num_blocks(self, block_size: int) -> int:
        """Full blocks of ``block_size`` tokens that have an identity, those of ``symbols``.

        For a prefix of hashes it is their number, whatever the block size.
        """
        _check_block_size(block_size)
        if self.hashed:
            return len(self._words) // _HASH_WORDS
        full = len(self._words) // block_size
        if not self.extra:
            return full
        return min([full, *(block for block, value in self.extra.items() if not value)])

    def symbols(self, root: bytes, block_size: int) -> Symbols:
        """The full blocks as symbols under ``root``. Built once per block size, then kept.

        A block with ``extra`` is represented by a digest of its tokens and the extra; it cannot
        equal any block of tokens, since its first id is negative. MisuseError where the block is
        too small to hold 256 bits of digest.
        """
        cached_size, width, data = self._cache
        if cached_size != block_size:
            width = KEY_BYTES if self.hashed else TOKEN_BYTES * block_size
            words = self.num_blocks(block_size) * width // TOKEN_BYTES
            data = self._words[:words].tobytes()
            if self.extra:
                data = self._with_digests(data, width)
            self._cache = (block_size, width, data)
        return Symbols(root, width, data)

    def with_tokens(self, tokens: Any, extra: Extra | None = None) -> Prefix:
        """The longer prefix that ``tokens`` (as in ``from_tokens``) follow. Does not mutate.

        ``extra`` adds to what is known; block numbers count from the start of the sequence.
        """
        if self.hashed:
            raise MisuseError("with_tokens: this prefix is made of hashes; use with_hashes")
        words = np.concatenate((self._words, token_ids(tokens)))
        return Prefix(words, self.salt, self.lora, {**self.extra, **_extra(extra)}, hashed=False)

    def with_hashes(self, hashes: bytes | Sequence[bytes]) -> Prefix:
        """The longer prefix that ``hashes`` (as in ``from_hashes``) follow. Does not mutate."""
        if not self.hashed:
            raise MisuseError("with_hashes: this prefix is made of tokens; use with_tokens")
        words = np.concatenate((self._words, _hash_words(hashes)))
        return Prefix(words, self.salt, self.lora, {}, hashed=True)

    def _with_digests(self, data: bytes, width: int) -> bytes:
        blocks = [block for block in self.extra if block * width < len(data)]
        if blocks and width < KEY_BYTES:
            raise MisuseError(
                f"extra needs blocks of at least {_HASH_WORDS} tokens, "
                f"not {width // TOKEN_BYTES}: a smaller one cannot hold a 256-bit digest"
            )
        mixed = bytearray(data)
        for block in blocks:
            place = slice(block * width, (block + 1) * width)
            mixed[place] = _extra_symbol(data[place], self.extra[block] or b"")
        return bytes(mixed)

    def _identity(self) -> tuple[object, ...]:
        return (
            self._words.tobytes(),
            self.salt,
            self.lora,
            self.hashed,
            frozenset(self.extra.items()),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        # Neither tokens nor salt: prompts and secrets do not belong into logs.
        what = "hashes" if self.hashed else "tokens"
        count = len(self._words) // (_HASH_WORDS if self.hashed else 1)
        return f"<Prefix of {count} {what}>"


def _extra_symbol(tokens: bytes, extra: bytes) -> bytes:
    """What stands for a block whose KV depends on more than its tokens; as wide as the tokens."""
    fields = (_EXTRA_TAG, tokens, extra)
    state = shake_256(b"".join(len(f).to_bytes(8, "little") + f for f in fields))
    symbol = bytearray(state.digest(len(tokens)))
    symbol[TOKEN_BYTES - 1] |= 0x80  # the sign of the first id, which no token has
    return bytes(symbol)


def _check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or block_size < 1:
        raise MisuseError(f"block_size must be a positive whole number, got {block_size!r}")


def _salt(salt: bytes) -> bytes:
    if not isinstance(salt, bytes):
        raise MisuseError(f"salt must be bytes, got {type(salt).__name__}: encode it first")
    return salt


def _lora(lora: bytes | str | None) -> bytes | None:
    if isinstance(lora, str):
        lora = lora.encode()
    if lora is not None and not isinstance(lora, bytes):
        raise MisuseError(f"lora must be bytes, text or None, got {type(lora).__name__}")
    if lora == b"":
        raise MisuseError("lora is empty: pass the adapter's content id, or None without adapter")
    return lora


def _extra(extra: Extra | None) -> Extra:
    if extra is None:
        return {}
    for block, value in extra.items():
        if not isinstance(block, int) or isinstance(block, bool) or block < 0:
            raise MisuseError(f"extra: a block number must be 0 or more, got {block!r}")
        if value is not None and not isinstance(value, bytes):
            kind = type(value).__name__
            raise MisuseError(f"extra of block {block} must be bytes or None, got {kind}")
    return dict(extra)


def _hash_words(hashes: bytes | Sequence[bytes]) -> TokenIds:
    if isinstance(hashes, str):
        raise MisuseError("hashes must be bytes, not text: decode the hexadecimal first")
    if not isinstance(hashes, bytes):
        for item in hashes:
            if not isinstance(item, bytes) or len(item) != KEY_BYTES:
                raise MisuseError(f"each block hash must be {KEY_BYTES} bytes, got {item!r:.80}")
        hashes = b"".join(hashes)
    if len(hashes) % KEY_BYTES:
        raise MisuseError(f"hashes: {len(hashes)} bytes are not whole hashes of {KEY_BYTES} bytes")
    return np.frombuffer(hashes, "<i4")
