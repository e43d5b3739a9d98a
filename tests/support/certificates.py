"""Certificates for tests, made by the openssl command when they are needed."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
"""Made in no time."""


def self_signed(folder: Path, name: str = "localhost", *, ca: bool = True) -> Path:
    """A key and a certificate for this DNS name, signed by itself, in one file. Without `ca` it says that it
    may sign nothing, as the certificate of a server often does."""
    made = folder / f"{name}.pem"
    key, signed = folder / "key.pem", folder / "signed.pem"
    constraint = "CA:TRUE" if ca else "CA:FALSE"
    _openssl(
        *("req", "-x509", *EC_KEY, "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"),
        *("-addext", f"basicConstraints=critical,{constraint}"),
        *("-keyout", str(key), "-out", str(signed)),
    )
    made.write_bytes(key.read_bytes() + signed.read_bytes())
    return made


def signed_by(authority: Path, folder: Path, name: str = "localhost") -> Path:
    """A key and a certificate for this DNS name, signed by the other one, in one file."""
    made, key, request = folder / f"{name}-signed.pem", folder / "leaf.pem", folder / "request.pem"
    signed, extension = folder / "leaf-signed.pem", folder / "extension.cnf"
    extension.write_text(f"subjectAltName=DNS:{name}\n")
    _openssl(
        *("req", *EC_KEY, "-nodes", "-subj", f"/CN={name}"),
        *("-keyout", str(key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority)),
        *("-days", "2", "-extfile", str(extension), "-out", str(signed)),
    )
    made.write_bytes(key.read_bytes() + signed.read_bytes())
    return made


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
