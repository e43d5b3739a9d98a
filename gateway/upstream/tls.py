"""What an engine behind TLS must prove, and to whom."""

import ssl
from functools import cache
from pathlib import Path


@cache
def usual_context(verify: bool) -> ssl.SSLContext:
    """With the system's certificates, or with none; one for all, since reading them takes its time."""
    return client_context(verify=verify)


def client_context(ca_file: Path | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """Certificate and name are checked against `ca_file` (PEM), or against what the system trusts. Raises
    OSError (`ssl.SSLError` is one) for a file that is not there or holds no certificate.

    A file of one's own may hold a private CA, or the engine's own certificate: what an operator has put there
    by name is trusted as it is, without being a CA and without the extensions that public ones must have.
    """
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.set_alpn_protocols(["http/1.1"])
    if ca_file is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
