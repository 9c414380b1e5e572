"""The seconds of experts whose rows are sent, computed and sent back in chunks, beside each other."""

from __future__ import annotations


def overlapped(there: float, experts: float, back: float, chunks: int, interference: float = 0.0) -> float:
    """Seconds until the last chunk is back. `there`, `experts` and `back` are the seconds of one chunk.

    One stream computes. Another one sends all chunks there, then each back once it is computed (Tutel, arXiv
    2206.03382, section 3.3). While both are busy each takes `interference` more of its time.
    """
    time, sent, computed = 0.0, 0, 0
    sending, computing = there, experts
    while sent < 2 * chunks:
        sends, computes = sent < chunks or computed > sent - chunks, computed < min(sent, chunks)
        slower = 1 + interference * (sends and computes)
        step = min(sending if sends else computing, computing if computes else sending)
        time += step * slower
        sending, computing = sending - step * sends, computing - step * computes
        if sends and sending <= 0:
            sent += 1
            sending = there if sent < chunks else back
        if computes and computing <= 0:
            computed += 1
            computing = experts
    return time
