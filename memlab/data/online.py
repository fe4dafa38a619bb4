"""Whether the model hub can be asked, found out quickly and once a process."""

import threading
import urllib.error
import urllib.request
from functools import lru_cache
from http.client import HTTPException

from huggingface_hub import constants

_PATIENCE_S = 3.0


@lru_cache
def hub_reachable() -> bool:
    """True when the hub answers within three seconds; never raises, never hangs.

    HF_HUB_OFFLINE and HF_ENDPOINT are respected, and the proxies of the environment.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=_PATIENCE_S).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in (403, 407):  # a proxy's refusal is no hub
                answered.set()
        except (OSError, ValueError, HTTPException):
            return
        else:
            answered.set()

    # looking up a name has no timeout of its own, so a thread does it and is left behind
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_PATIENCE_S)
