"""Why there is no TLS with the other end, in words: of what OpenSSL, or an alert, names."""

from __future__ import annotations

from transfer_engine.errors import AuthError

__all__ = ["MUTUAL", "failed"]

MUTUAL = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
"""What a server says that asks for a certificate, and got none."""
_ANOTHER = {"WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"}


def failed(reason: str) -> AuthError:
    """Say in words what OpenSSL, or an alert of the other end, names so."""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthError(
            "the client showed no certificate",
            advice="set tls_certificate and tls_key there",
        )
    if reason == MUTUAL:
        return AuthError(
            "the server asks for a certificate, and none is set here",
            advice="set tls_certificate and tls_key: a certificate that its authority signed",
        )
    if reason in _ANOTHER:
        return AuthError(f"the other end does not speak TLS 1.3: {reason}", advice="upgrade it")
    if "ALERT" in reason:
        return AuthError(
            f"the other end refused the TLS connection: {reason}",
            advice="check the certificate shown here, its dates, and tls_authority there",
        )
    return AuthError(f"the TLS connection failed: {reason}", advice="connect anew")
