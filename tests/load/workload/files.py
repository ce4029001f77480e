"""Small files in the formats of the datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,30,12
2023-11-16 18:15:51.2224670,3000,5
2023-11-16 18:16:00.0000001,200,60
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
118.5,GPT-4,88,31,119,API log
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 6, "hash_ids": [0, 1, 2]},
    {"timestamp": 40, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 41, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]},
    {"timestamp": 2500, "input_length": 512, "output_length": 9, "hash_ids": [0]},
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def sharegpt(path: Path, pairs: list[tuple[str, ...]]) -> Path:
    speakers = ("human", "gpt")
    entries = [
        {
            "id": str(number),
            "conversations": [{"from": speakers[i % 2], "value": said} for i, said in enumerate(pair)],
        }
        for number, pair in enumerate(pairs)
    ]
    return write(path, json.dumps(entries, indent=1))
