"""Routes, by whose clients call them."""

from millpond.server.routes import (
    classify,
    cohere,
    embeddings,
    metrics,
    page,
    pooling,
    predict,
    rerank,
    root,
    score,
    service,
    tei,
    tokenize,
)

ROUTERS = (
    embeddings.router,
    pooling.router,
    classify.router,
    tokenize.router,
    score.router,
    rerank.router,
    cohere.router,
    tei.router,
    predict.router,
    root.router,
    metrics.router,
    page.router,
    service.router,
)
