"""Object mappers on a table of work, with the mappings of docs/tutorial/orms.md: each saves a run that it has claimed, one
that was swept up since, and one that was claimed since. It fails where something else comes of it than the page says."""

import asyncio
import sys

import psycopg

port, name = sys.argv[1:]
database = psycopg.connect(host="127.0.0.1", port=port, dbname=name, user="postgres", autocommit=True)


def sql(text, *given):
    cursor = database.execute(text, given)
    return cursor.fetchone()[0] if cursor.description else None


def claim():
    return sql("UPDATE runs SET state = 'running', held_until = clock_timestamp() + '1 h' WHERE id = 1 RETURNING fence")


def give_up(token):
    sql("UPDATE runs SET state = 'ready', held_until = NULL, fence = %s WHERE id = 1", token)


def result():
    return sql("SELECT result FROM runs WHERE id = 1")


async def play(mapper, load, save, tells, of_older="PF001"):
    """`tells` reads from an error what it is."""

    async def comes(given, what, wanted):
        try:
            await save(given, what)
            came = "done"
        except Exception as error:
            came = tells(error)
        assert came == wanted, f"{mapper}, {what}: {came}, not {wanted}"

    token = claim()
    # One object for each case: after an error some mappers read the row again, and then have another's token.
    given, swept_up, older = [await load() for _ in range(3)]
    await comes(given, f"{mapper} holds it", "done")
    assert result() == f"{mapper} holds it", result()
    await comes(given, f"{mapper} writes again", "done")
    assert result() == f"{mapper} writes again", result()
    give_up(token)
    await comes(swept_up, "swept up", "PF004")
    token = claim()
    await comes(older, "claimed since", of_older)
    assert result() == f"{mapper} writes again", result()
    give_up(token)


def at_once(work):
    async def call(*given):
        return work(*given)

    return call


async def sqlalchemy():
    from sqlalchemy import BigInteger, create_engine
    from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
    from sqlalchemy.orm.exc import StaleDataError

    engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}")

    class Base(DeclarativeBase):
        pass

    class Run(Base):
        __tablename__ = "runs"
        id: Mapped[int] = mapped_column(primary_key=True)
        result: Mapped[str | None]
        fence: Mapped[int | None] = mapped_column(BigInteger)
        __mapper_args__ = {"version_id_col": fence, "version_id_generator": lambda v: v}

    def save(run, what):
        with Session(engine, expire_on_commit=False) as session, session.begin():
            session.add(run)
            run.result = what

    def load():
        with Session(engine) as session:
            run = session.get_one(Run, 1)
            session.expunge(run)
            return run

    def tells(error):
        return "another version" if isinstance(error, StaleDataError) else error.orig.sqlstate

    await play("SQLAlchemy", at_once(load), at_once(save), tells, of_older="another version")


async def django():
    import django
    from asgiref.sync import sync_to_async
    from django.conf import settings
    from django.db import ProgrammingError, models

    place = {"HOST": "127.0.0.1", "PORT": port, "NAME": name, "USER": "postgres"}
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}})
    django.setup()

    class Run(models.Model):
        id = models.BigIntegerField(primary_key=True)
        result = models.TextField(null=True)
        fence = models.BigIntegerField(null=True, editable=False)

        class Meta:
            app_label = "work"
            db_table = "runs"

    def save(run, what):
        run.result = what
        run.save()

    def tells(error):
        assert isinstance(error, ProgrammingError), repr(error)
        return error.__cause__.sqlstate

    await play("Django", sync_to_async(lambda: Run.objects.get(id=1)), sync_to_async(save), tells)


async def peewee():
    import peewee

    class Run(peewee.Model):
        id = peewee.BigIntegerField(primary_key=True)
        result = peewee.TextField(null=True)
        fence = peewee.BigIntegerField(null=True)

        class Meta:
            table_name = "runs"
            database = peewee.PostgresqlDatabase(name, host="127.0.0.1", port=int(port), user="postgres")

    def save(run, what):
        run.result = what
        with Run._meta.database.atomic():
            run.save()

    def tells(error):
        assert isinstance(error, peewee.InternalError), repr(error)
        return error.orig.pgcode

    await play("Peewee", at_once(lambda: Run.get_by_id(1)), at_once(save), tells)


async def pony():
    from pony.orm import Database, Optional, PrimaryKey, db_session
    from pony.orm.core import InternalError

    db = Database()

    class Run(db.Entity):
        _table_ = "runs"
        id = PrimaryKey(int, size=64)
        result = Optional(str, nullable=True)
        fence = Optional(int, size=64, volatile=True)

        def before_update(self):
            self.fence = self.fence

    db.bind(provider="postgres", host="127.0.0.1", port=port, database=name, user="postgres")
    db.generate_mapping(create_tables=False)

    def tells(error):
        assert isinstance(error, InternalError), repr(error)
        return error.original_exc.pgcode

    # An object lives no longer than its session.
    def saves(between, wanted):
        try:
            with db_session:
                run = Run[1]
                between()
                run.result = wanted
            came = "done"
        except Exception as error:
            came = tells(error)
        assert came == wanted, f"Pony: {came}, not {wanted}"

    token = claim()
    saves(lambda: None, "done")
    assert result() == "done"
    saves(lambda: give_up(token), "PF004")
    token = claim()
    saves(lambda: (give_up(token), claim()), "PF001")
    assert result() == "done"
    give_up(sql("SELECT fence FROM runs WHERE id = 1"))


async def tortoise():
    from tortoise import Tortoise, fields
    from tortoise.models import Model

    class Run(Model):
        id = fields.BigIntField(primary_key=True, generated=False)
        result = fields.TextField(null=True)
        fence = fields.BigIntField(null=True)

        class Meta:
            table = "runs"

    module = type(sys)("tortoise_models")
    module.Run = Run
    sys.modules["tortoise_models"] = module
    await Tortoise.init(
        db_url=f"asyncpg://postgres@127.0.0.1:{port}/{name}", modules={"models": ["tortoise_models"]}
    )

    async def save(run, what):
        run.result = what
        await run.save()

    async def load():
        return await Run.get(id=1)

    await play("Tortoise", load, save, lambda error: error.sqlstate)
    await Tortoise.close_connections()


async def piccolo():
    from piccolo.columns import BigInt, Text
    from piccolo.engine.postgres import PostgresEngine
    from piccolo.table import Table

    engine = PostgresEngine(config={"host": "127.0.0.1", "port": int(port), "database": name, "user": "postgres"})

    class Run(Table, tablename="runs", db=engine):
        id = BigInt(primary_key=True)
        result = Text(null=True)
        fence = BigInt(null=True)

    async def load():
        return await Run.objects().get(Run.id == 1)

    async def save(run, what):
        run.result = what
        await run.save()

    await play("Piccolo", load, save, lambda error: error.sqlstate)


for mapper in [sqlalchemy, django, peewee, pony, tortoise, piccolo]:
    asyncio.run(mapper())
