"""Names of the metadata that travels with calls, each written once.

gRPC wants lower case; a name that ends in "-bin" carries bytes.
"""

__all__ = ["AUTHORIZATION", "RETRY_PUSHBACK_MS", "STATUS_DETAILS", "TRACE_PARENT"]

# Serialised google.rpc.Status of a call that failed.
STATUS_DETAILS = "grpc-status-details-bin"
# What gRPC's own retry logic obeys (gRFC A6): a wait in ms, negative for never.
RETRY_PUSHBACK_MS = "grpc-retry-pushback-ms"
# "Bearer " and an API key.
AUTHORIZATION = "authorization"
# W3C Trace Context.
TRACE_PARENT = "traceparent"
