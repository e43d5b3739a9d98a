import io
import threading

from gateway.telemetry.log_output import LogOutput


class Stuck(io.StringIO):
    """A reader that has stopped reading, until told to go on."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def write(self, text):
        self.reached.set()
        assert self.go_on.wait(10)
        return super().write(text)


class Ascii(io.StringIO):
    def write(self, text):
        text.encode("ascii")
        return super().write(text)


def test_lines_come_out_by_themselves():
    """Nobody has to ask for a flush."""
    stream = Stuck()
    stream.go_on.set()
    output = LogOutput(stream)
    output.write("one")
    assert stream.reached.wait(10)
    output.close()
    assert stream.getvalue() == "one\n"


def test_close_writes_what_is_held_and_later_lines_still_come():
    stream = io.StringIO()
    output = LogOutput(stream)
    output.write("one")
    output.write("two")
    output.close()
    assert stream.getvalue() == "one\ntwo\n"
    output.write("three")
    assert stream.getvalue() == "one\ntwo\nthree\n"


def test_a_stuck_reader_stops_nobody_and_fills_no_memory():
    """Lines are taken at once while nobody reads, up to a limit; what was dropped is told."""
    stream = Stuck()
    output = LogOutput(stream, held_characters_max=100)
    output.write("first")
    assert stream.reached.wait(10)
    for _ in range(50):
        output.write("x" * 9)
    stream.go_on.set()
    output.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "first"
    assert lines.count("x" * 9) == 11
    assert '"count":39' in lines[-1]


def test_a_closed_stream_is_no_error():
    stream = io.StringIO()
    output = LogOutput(stream)
    stream.close()
    output.write("lost")
    output.close()


def test_a_stream_that_cannot_write_a_character_gets_its_escape():
    stream = Ascii()
    output = LogOutput(stream)
    output.write("modèle")
    output.close()
    assert stream.getvalue() == "mod\\xe8le\n"
