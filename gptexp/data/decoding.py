"""The bytes of a file as text: which encoding they are in, and how many of them are not text in it.

Such bytes become U+FFFD, as with Python's `errors="replace"`, and are counted. Many of them show that the text is in
another encoding.
"""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

UTF_8 = "utf-8"
MOST_REPLACED = 1 / 1000  # the largest share of bytes that are not text
FOREIGN_BYTES = 100  # more bytes than characters; short text in another encoding may be UTF-8 by chance
# A file's first bytes -> its encoding. UTF-32's mark begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF8: UTF_8,
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


@dataclass
class Seen:
    """What was seen in a part of a corpus."""

    documents: int = 0  # that begin in it
    read: int = 0  # bytes of text and jsonl, without compression
    replaced: int = 0  # of these bytes, those that are not text in the encoding of their file
    span: int = 0  # the first of them: the number of its span in the part,
    byte: int = 0  # and its place in its file, without compression
    separated: int = 0  # places where `data.separator` ends a document
    end_lines: int = 0  # lines of documents that are `END_LINE`

    @property
    def is_mostly_text(self) -> bool:
        return self.replaced <= MOST_REPLACED * self.read


def decoded(blocks: Iterable[bytes], encoding: str, start: int, seen: Seen) -> Iterator[str]:
    """The text of the bytes `blocks`, which begin at byte `start` of a file, without a byte-order mark; adds to `seen`.

    `encoding` is the name of one of Python's codecs. Yields no empty text.
    """
    decoder, end, mark = codecs.getincrementaldecoder(encoding)(_NOTE), start, "" if start else "\ufeff"
    for block in chain(blocks, [b""]):
        end += len(block)
        seen.read += len(block)
        _noted.clear()
        text = decoder.decode(block, not block)
        for distance, length in _noted:
            seen.byte = seen.byte if seen.replaced else end - distance
            seen.replaced += length
        if text:
            yield text.removeprefix(mark)
            mark = ""


def is_plainly_utf_8(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 with too many characters beyond ASCII for a coincidence.

    Many of Python's codecs decode them without an error, to other text.
    """
    try:
        text = codecs.getincrementaldecoder(UTF_8)().decode(head)
    except UnicodeDecodeError:
        return False
    return len(head) - len(text) >= FOREIGN_BYTES


_NOTE = "gptexp.note"  # the name of `_note` as an error handler of codecs
_noted: list[tuple[int, int]] = []  # by the decoder's last call: how far from the end bytes are wrong, and how many


def _note(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _noted.append((len(error.object) - error.start, error.end - error.start))
    return "\ufffd", error.end


codecs.register_error(_NOTE, _note)
