"""Text that can be shown at once: no half characters, no part of a stop string."""

import time

from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine.text import AnswerText, Detokenizer, StopMatcher


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(ids):
    detokenizer = Detokenizer(decode_bytes)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.text(max_size=40))
def test_text_comes_out_whole_and_never_half_a_character(text):
    pieces = pieces_of(text.encode())
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_come_out_as_the_decoder_writes_them(ids):
    assert "".join(pieces_of(ids)) == decode_bytes(ids)


def fallback_decode(ids):
    """As tokenizers with byte fallback do: a run of bytes is text as a whole, or all marks."""
    text, run = "", b""
    for piece in (*ids, None):
        if isinstance(piece, int):
            run += bytes([piece])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run = b""
        text += piece or ""
    return text


@given(
    st.lists(st.one_of(st.sampled_from(["a", " b", ""]), st.text("é日🎉", min_size=1, max_size=3)))
)
def test_byte_fallback_text_comes_out_whole(parts):
    ids = [i for part in parts for i in ([part] if part in ("a", " b", "") else part.encode())]
    detokenizer = Detokenizer(fallback_decode)
    shown = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
    assert "".join(shown) == fallback_decode(ids) == "".join(parts)


def test_an_id_without_text_does_not_swallow_the_space_of_the_next_word():
    words = {1: " a", 2: "", 3: " b"}

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(i) for i in (1, 2, 3)] == ["a", "", " b"]


def test_bytes_that_never_become_text_are_shown_in_bounded_work():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode)
    shown = "".join(detokenizer.push(0xFF) for _ in range(2000)) + detokenizer.flush()
    assert shown == "\ufffd" * 2000
    assert max(decoded) <= 70


def test_a_character_of_four_tokens_is_held_until_it_is_whole():
    assert pieces_of("a\U0001f410b".encode()) == ["a", "", "", "", "\U0001f410", "b", ""]


def test_an_end_inside_a_character_is_shown_at_the_flush():
    assert pieces_of("é".encode()[:1]) == ["", "\ufffd"]


@given(
    st.lists(st.text("ab<|", max_size=4), max_size=12),
    st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=3),
)
def test_what_is_shown_is_the_text_before_the_earliest_stop(pieces, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    found = matcher.found
    shown += matcher.flush()
    whole = "".join(pieces)
    if found is None:
        assert shown == whole
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(shown + found)
        assert not any(stop in shown for stop in stops)


@given(
    st.lists(st.text("ab", max_size=4), max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=8), max_size=3),
)
def test_no_more_is_held_back_than_may_begin_a_stop(pieces, stops):
    matcher, shown, pushed = StopMatcher(stops), "", ""
    for piece in pieces:
        shown, pushed = shown + matcher.push(piece), pushed + piece
        if matcher.found is not None:
            return
        begun = (n for stop in stops for n in range(len(stop)) if pushed.endswith(stop[:n]))
        assert len(shown) == len(pushed) - max(begun, default=0)


def test_stops_made_to_be_slow_cost_no_more_than_others():
    stops = ["a" * 3000, *("b" + "a" * 3000 + chr(300 + i) for i in range(255))]
    matcher = StopMatcher(stops)
    begun = time.process_time()
    for _ in range(2000):
        assert matcher.push("a") == ""
    # 0.3 s; where each beginning is tried anew it is 250 s, and every other stream waits.
    assert time.process_time() - begun < 10.0


def test_a_stop_string_across_pieces_is_never_shown_in_part():
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(p) for p in ("hi <", "en", "d", "> more")] == ["hi ", "", "", ""]
    assert matcher.found == "<end>"


def test_what_looked_like_a_stop_string_is_shown_once_it_is_none():
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(p) for p in ("<en", "x")] == ["", "<enx"]


def test_stop_strings_are_found_in_the_joined_answer():
    text = AnswerText(decode_bytes, ["é!"])
    shown = "".join(text.push(i) for i in "caf\u00e9!x".encode())
    assert (shown, text.stopping_word) == ("caf", "é!")
