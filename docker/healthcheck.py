"""The container's health check: exit 0 when `/healthz` answers 2xx, else 1 with the reason.

Run by the engine inside the container, with the standard library only, so that the image needs no
curl. The port is the one of `HEADRACE_SERVER__PORT`, as for the service itself. No proxy is asked.
"""

import http.client
import os
import sys

TIMEOUT_S = 3.0


def main() -> int:
    port = int(os.environ.get("HEADRACE_SERVER__PORT", "8421"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"127.0.0.1:{port}/healthz does not answer: {error}")
        return 1
    finally:
        connection.close()
    if not 200 <= status < 300:
        print(f"127.0.0.1:{port}/healthz answers {status}, want 2xx")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
