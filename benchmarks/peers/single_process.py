"""The process of one revision of millpond: the name of a way to call it per line, percentiles and processor time back.

It imports nothing else of this repository, and finds its revision by PYTHONPATH. Texts come as a JSON file.
"""

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

model, inputs, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(inputs, encoding="utf-8") as file:
    TEXTS = json.load(file)  # queries, docs


def summary(seconds, processor):
    """Milliseconds of a call, and of the processor's."""
    ordered = sorted(seconds)
    return {
        "p50": 1000 * ordered[len(ordered) // 2],
        "p90": 1000 * ordered[9 * len(ordered) // 10],
        "cpu": 1000 * processor / len(ordered),
    }


def one_by_one(call, texts):
    """Calls with a text each."""
    seconds = []
    processor = time.process_time()
    for index in range(count):
        begin = time.perf_counter()
        call(texts[index % len(texts)])
        seconds.append(time.perf_counter() - begin)
    return summary(seconds, time.process_time() - processor)


async def awaited(call, texts):
    """Awaited calls with a text each."""
    seconds = []
    processor = time.process_time()
    for index in range(count):
        begin = time.perf_counter()
        await call(texts[index % len(texts)])
        seconds.append(time.perf_counter() - begin)
    return summary(seconds, time.process_time() - processor)


def passed(calls, tokens, callers=1):
    """Tokens per second of calls with some texts each, by several threads; and processor seconds a million."""
    chunks, lock = iter(calls), threading.Lock()

    def work():
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            engine.embed(chunk)

    threads = [threading.Thread(target=work) for _ in range(callers)]
    processor, begin = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    return {"tokens/s": tokens / seconds, "cpu": 1e6 * (time.process_time() - processor) / tokens}


def cut(texts, size):
    """Distinct texts in lists of ``size``, and their tokens."""
    many = [f"{texts[index % len(texts)]} {index}" for index in range(count)]
    return [many[start : start + size] for start in range(0, count, size)], sum(engine.count_tokens(many))


class Server:
    """This revision's server, in a process of its own."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "millpond", "serve", model, "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.connection = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(600):
            try:
                self.connection.request("GET", "/health")
                self.connection.getresponse().read()
                break
            except OSError:
                self.connection.close()
                time.sleep(0.1)

    def embed(self, text):
        """A request for one vector."""
        body = json.dumps({"input": text, "encoding_format": "base64"}).encode()
        self.connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content)

    def measured(self):
        """Requests one by one; the processor time is the server's."""
        self.connection.close()  # the server has closed it if it was idle for long
        for text in TEXTS["queries"]:
            self.embed(text)
        before = self.processor()
        found = one_by_one(self.embed, TEXTS["queries"])
        return {**found, "cpu": 1000 * (self.processor() - before) / count}

    def processor(self):
        """Seconds of processor time of all of its threads."""
        folder = f"/proc/{self.process.pid}/task"
        total = 0
        for task in os.listdir(folder):
            with open(f"{folder}/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
        return total / 1e9


def main():
    """Answer until the input ends."""
    queries, docs = TEXTS["queries"], TEXTS["docs"]
    server = Server() if sys.platform == "linux" else None
    ways = {
        "embed a query": lambda: one_by_one(lambda text: engine.embed([text]), queries),
        "embed a docstring": lambda: one_by_one(lambda text: engine.embed([text]), docs),
        "embed_query": lambda: one_by_one(adapter.embed_query, queries),
        "aembed a query": lambda: asyncio.run(awaited(lambda text: loop_engine.embed([text]), queries)),
        "aembed_query": lambda: asyncio.run(awaited(adapter.aembed_query, queries)),
        "score of one pair": lambda: one_by_one(lambda text: engine.score(text, docs[0]), queries),
        "token_embed a query": lambda: one_by_one(lambda text: engine.token_embed([text]), queries),
        **{f"{n} callers, queries": lambda n=n: passed(*cut(queries, 1), callers=n) for n in (1, 2, 4, 8, 64)},
        **{f"{n} docstrings a call": lambda n=n: passed(*cut(docs, n)) for n in (1, 4, 16)},
        "bulk, queries": lambda: passed(*cut(queries, count)),
        "bulk, docstrings": lambda: passed(*cut(docs, count)),
        **({"HTTP, a query (cpu: the server's)": server.measured} if server else {}),
    }
    print(json.dumps(list(ways)), flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(ways[json.loads(line)]()), flush=True)
    finally:
        if server:
            server.process.terminate()


if __name__ == "__main__":
    from langchain_millpond import MillpondEmbeddings
    from millpond import AsyncEngine, Engine

    engine = Engine(model)
    adapter, loop_engine = MillpondEmbeddings(engine=engine), AsyncEngine(engine)
    main()
