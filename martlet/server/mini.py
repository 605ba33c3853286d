"""mini-picoLM at /mini: a page that runs a model in the browser, and the model's file for it.

The page is one file, built from `web/` (`npm run build`). Its headers isolate it from other
origins, which browsers require before workers may share memory. The model's file is served by
ranges, only with `share_model`, and needs an API key if the server has any. Read
`web/src/18-loop.ts` next.
"""

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from martlet.server.error_replies import ApiError
from martlet.server.service import service_of
from martlet.server.web import HEADERS

PAGE = Path(__file__).parent / "mini_page" / "index.html"
MODEL_HEADERS = {
    "Cache-Control": "no-store",  # the page caches the pieces itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


async def mini(request: Request) -> Response:
    """Redirect /mini to /mini/, since the page requests the model by a relative path."""
    return RedirectResponse(request.url.path + "/", 308)


async def mini_page(request: Request) -> Response:
    """The mini-picoLM page."""
    data, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="text/html; charset=utf-8")


async def mini_model(request: Request) -> Response:
    """The served model's GGUF file, whole or by ranges."""
    service = service_of(request)
    path = Path(service.built.config.model)
    if not service.settings.share_model:
        raise ApiError(404, "This server keeps its model's file; start it with --share-model to let /mini read it.")
    if path.suffix != ".gguf" or not path.is_file():
        raise ApiError(404, "This server's model is no single GGUF file, which is all that /mini reads.")
    return FileResponse(path, headers=MODEL_HEADERS, media_type="application/octet-stream", filename=path.name)


@lru_cache(1)
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers; the policy allows only its own scripts, by their hashes."""
    data = PAGE.read_bytes()
    text = data.decode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes('script', text)} blob:",  # blob: workers, whose source is in the script
            f"style-src {_hashes('style', text)}",
            "worker-src blob:",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return data, {
        **HEADERS,
        "Content-Security-Policy": policy,
        "Cross-Origin-Embedder-Policy": "require-corp",
        "ETag": tag,
    }


def _hashes(tag: str, html: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


MINI_ROUTES = (
    Route("/mini", mini, include_in_schema=False),
    Route("/mini/", mini_page, include_in_schema=False),
    Route("/mini/model.gguf", mini_model, include_in_schema=False),
)
