# PostgreSQL 15 with pg_fence, built from this source:
#
#     docker build -t pg_fence . && docker run --rm -e POSTGRES_PASSWORD=secret -p 5432:5432 pg_fence
#
# and the demonstration:
#
#     docker build --target demo -t pg_fence_demo . && docker run --rm pg_fence_demo
#
# Both images may be any of Debian 12: the first with Rust, the second with Debian's or the project's PostgreSQL 15.
ARG RUST=docker.io/library/rust:1.95.0-bookworm
ARG POSTGRES=docker.io/library/postgres:15-bookworm

FROM ${RUST} AS demo
WORKDIR /pg_fence
COPY . .
RUN cargo run -- install --destdir /installed
CMD ["cargo", "run", "--quiet", "--", "demo"]

FROM ${POSTGRES}
COPY --from=demo /installed/ /
# The official image runs it once, in the database that it makes.
RUN mkdir -p /docker-entrypoint-initdb.d \
 && echo 'CREATE EXTENSION pg_fence;' > /docker-entrypoint-initdb.d/pg_fence.sql
