"""Start a server, ask it with OpenAI's client, and end it.

Usage: python examples/ask_a_server.py [MODEL]
"""

import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

from openai import OpenAI

name, port = sys.argv[1] if len(sys.argv) > 1 else "models/target", 8765
server = subprocess.Popen([sys.executable, "-m", "foretoken", "serve", name, "--port", str(port)])
try:
    while server.poll() is None:  # until it is ready, or has ended with a sentence that says why
        try:
            urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).close()
            break
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.completions.create(model=model, prompt="def main():\n", max_tokens=48, temperature=0.0, stream=True)
    for part in stream:
        print(part.choices[0].text, end="", flush=True)
    print()
finally:
    server.terminate()
    server.wait(60)
