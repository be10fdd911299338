import asyncio
import os
import sys
from pathlib import Path

from mcp import Client, StdioServerParameters

Path("bakery").mkdir()
Path("bakery/README.md").write_text("# Bakery\n\n## Opening hours\nFrom seven, but never on Mondays.\n")
Path("bakery/oven.py").write_text("def preheat(celsius):\n    return Oven().heat_to(celsius)\n")


async def main() -> None:
    model = ["--model", "sentence-transformers/all-MiniLM-L6-v2"]
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "millpond", "mcp", "bakery", *model], env=dict(os.environ)
    )
    async with Client(server) as client:
        for query in ("when is the shop open?", "how does the oven get hot?"):
            answer = await client.call_tool("search", {"query": query, "top_k": 1})
            for hit in answer.structured_content["hits"]:
                print(query, "->", hit["id"], hit["metadata"]["name"])


asyncio.run(main())
