import ollama

client = ollama.Client("http://127.0.0.1:8000")
print(client.list().models[0].model)
texts = ["The mill stands by the pond.", "Water turns the wheel.", "It rained all night."]
vectors = client.embed("minilm", texts).embeddings
(query,) = client.embed("minilm", "What moves the wheel?").embeddings
scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
print(f"{max(scores):.2f} {texts[scores.index(max(scores))]}")
