"""Bodies of `multipart/form-data`."""

BOUNDARY = b"----form-of-a-test"
CONTENT_TYPE = b"multipart/form-data; boundary=" + BOUNDARY


def field(name: str, value: str) -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode()


def file(name: str, data: bytes) -> bytes:
    head = (
        f'Content-Disposition: form-data; name="{name}"; filename="a.mp3"\r\nContent-Type: audio/mpeg\r\n\r\n'
    )
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"
