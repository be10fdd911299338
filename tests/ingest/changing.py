"""Sources that change as people and programs change them: a folder, a file of JSONL, and a table of PostgreSQL."""

import json
import os

from millpond.ingest import Record, read

SIZE = 60


class Folder:
    """Markdown files of a few sections, in folders."""

    options = ()

    def __init__(self, place, chance):
        self.path, self._chance = place / "f", chance
        self.path.mkdir()
        for number in range(SIZE):
            (self.path / f"a{number}.md").write_text(self._text())
        self.name = str(self.path)

    def _text(self):
        sections = range(self._chance.randrange(1, 5))
        return "# Mill\n" + "".join(f"## S{number}\nstone {self._chance.random()}\n\n" for number in sections)

    def change(self):
        """One change."""
        chance = self._chance
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        kind = chance.randrange(6)
        if kind == 0 and len(files) > SIZE // 2:
            chance.choice(files).unlink()
        elif kind == 1:
            os.rename(path := chance.choice(files), path.with_name(f"moved{chance.getrandbits(40)}{path.suffix}"))
        elif kind == 2:
            new = self.path / ".new"
            new.write_text(self._text())
            os.replace(new, chance.choice(files))
        elif kind == 3 and (inner := [path for path in self.path.iterdir() if path.is_dir()]):
            os.rename(chance.choice(inner), self.path / f"dir{chance.getrandbits(40)}")
        elif kind == 4:
            (below := self.path / f"dir{chance.getrandbits(40)}").mkdir(exist_ok=True)
            (below / f"new{chance.randrange(1000)}.md").write_text(self._text())
        else:
            chance.choice(files).write_text(self._text())

    def settle(self):
        """Leave nothing half written."""

    def records(self):
        """What the source has now."""
        return {record.id: record for record in read(self.path)}


class Lines:
    """A file of JSONL: lines are added, in parts too; it is cut, written anew in place, and replaced."""

    options = ()

    def __init__(self, place, chance):
        self.path, self._chance = place / "events.jsonl", chance
        self._number, self._torn = 0, ""
        self.path.write_text("".join(self._line() for _ in range(4 * SIZE)))
        self.name = str(self.path)

    def _line(self):
        self._number += 1
        row = {"id": f"r{self._number}", "text": f"stone {self._chance.random()}", "n": self._chance.randrange(9)}
        return json.dumps(row) + "\n"

    def _append(self, text):
        with self.path.open("a") as file:
            file.write(text)

    def change(self):
        """One change."""
        self.settle()
        chance, lines = self._chance, self.path.read_text().splitlines(keepends=True)
        kind = chance.randrange(8)
        if kind == 0 and len(lines) > 3 * SIZE:
            os.truncate(self.path, sum(len(line) for line in lines[: chance.randrange(2 * SIZE, len(lines))]))
        elif kind == 1:
            self.path.write_text("".join(self._other(lines)))
        elif kind == 2:
            new = self.path.with_name("new")
            new.write_text("".join(self._other(lines)))
            os.replace(new, self.path)
        elif kind == 3:
            line = self._line()
            place = chance.randrange(1, len(line) - 2)
            self._append(line[:place])
            self._torn = line[place:]
        else:
            self._append("".join(self._line() for _ in range(chance.randrange(1, 20))))

    def _other(self, lines):
        """The lines without some, with others changed, and one more."""
        for line in lines:
            row = json.loads(line)
            fate = self._chance.random()
            if fate > 0.03:
                row["text"] += " changed" if fate > 0.95 else ""
                yield json.dumps(row) + "\n"
        yield self._line()

    def settle(self):
        """Leave no line half written."""
        self._append(self._torn)
        self._torn = ""

    def records(self):
        """What the source has now."""
        rows = map(json.loads, self.path.read_text().splitlines())
        return {row["id"]: Record(row["id"], row["text"], {"n": row["n"]}) for row in rows}


class Table:
    """A table of PostgreSQL with a column that says when a row was changed."""

    options = ("--updated", "changed", "--metadata", "n", "--poll", "0.1")

    def __init__(self, server, chance):
        self._dsn, self._chance, self._number = server.schema(), chance, 0
        self._execute("CREATE TABLE docs (id text PRIMARY KEY, text text, n int, changed timestamptz)")
        self._insert(4 * SIZE)
        self.name = f"{self._dsn}#docs"

    def _execute(self, *statements):
        """In one transaction; what it counts is known at once, as the connection ends."""
        import psycopg

        with psycopg.connect(self._dsn) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _insert(self, count):
        first, self._number = self._number, self._number + count
        self._execute(
            f"INSERT INTO docs SELECT 'r' || n, 'stone ' || random(), n % 9, clock_timestamp() "
            f"FROM generate_series({first}, {self._number - 1}) n"
        )

    def change(self):
        """One change."""
        chance = self._chance
        some = f"id IN (SELECT id FROM docs ORDER BY random() LIMIT {chance.randrange(1, 12)})"
        kind = chance.randrange(6)
        if kind == 0 and self._execute("SELECT count(*) FROM docs")[0][0] > 3 * SIZE:
            self._execute(f"DELETE FROM docs WHERE {some}")
        elif kind == 1:
            self._execute(f"UPDATE docs SET n = n + 1, changed = clock_timestamp() WHERE {some}")
        elif kind == 2:  # gone and back, as another row
            self._execute(
                f"CREATE TEMPORARY TABLE moved ON COMMIT DROP AS SELECT * FROM docs WHERE {some}",
                "DELETE FROM docs WHERE id IN (SELECT id FROM moved)",
                "INSERT INTO docs SELECT id, text || ' back', n, clock_timestamp() FROM moved",
            )
        elif kind == 3:
            self._insert(chance.randrange(1, 20))
        else:
            self._execute(f"UPDATE docs SET text = 'stone ' || random(), changed = clock_timestamp() WHERE {some}")

    def settle(self):
        """Nothing is half written."""

    def records(self):
        """What the source has now."""
        rows = self._execute("SELECT id, text, n FROM docs")
        return {name: Record(name, text, {"n": number}) for name, text, number in rows}
