package pgfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"pgfence.example/pgfence"
)

// The lease of a nightly run, for as long as a function takes.
func ExampleFence_Hold() {
	fence := pgfence.New(os.Getenv("DATABASE_URL"))
	err := fence.Hold(context.Background(), "nightly", pgfence.Options{TTL: time.Minute},
		func(ctx context.Context, lease *pgfence.Lease) error {
			fmt.Println("held:", lease.Held())
			return nil
		})
	fmt.Println("error:", err)
	// Output:
	// held: true
	// error: <nil>
}

// Somebody else has it.
func ExampleFence_Acquire() {
	fence := pgfence.New(os.Getenv("DATABASE_URL"))
	lease, err := fence.Acquire(context.Background(), "report", pgfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release()
	_, err = fence.Acquire(context.Background(), "report", pgfence.Options{})
	fmt.Println(errors.Is(err, pgfence.ErrLeaseTaken), err)
	// Output: true the lease report is taken
}

// Several workers share the rows of a table out among themselves.
func ExampleFence_Claim() {
	fence := pgfence.New(os.Getenv("DATABASE_URL"))
	leases, err := fence.Claim(context.Background(),
		"SELECT 'job:' || id, id FROM generate_series($1::int, 9) AS id ORDER BY id", []any{4}, 2, pgfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, lease := range leases {
		fmt.Println(lease.Names(), lease.Row()["id"])
		_ = lease.Release()
	}
	// Output:
	// [job:4] 4
	// [job:5] 5
}

// A lease goes from one process to another: a web request acquires it, and what takes a job from a queue goes on.
func ExampleFence_Resume() {
	web, worker := pgfence.New(os.Getenv("DATABASE_URL")), pgfence.New(os.Getenv("DATABASE_URL"))
	lease, err := web.Acquire(context.Background(), "upload:3", pgfence.Options{TTL: 5 * time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	token, err := lease.Detach()
	if err != nil {
		log.Fatal(err)
	}
	resumed, err := worker.Resume(context.Background(), "upload:3", token, pgfence.Options{})
	fmt.Println(err, resumed.Held(), resumed.Release())
	// Output: <nil> true <nil>
}

// Writes of pgx, in a transaction during which nobody else is granted the lease.
func ExampleGuard() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	err = pgfence.NewConfig(pool.Config().ConnConfig).Hold(ctx, "page:7", pgfence.Options{},
		func(ctx context.Context, lease *pgfence.Lease) error {
			return pgfence.Guard(ctx, lease, pool.Begin, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 'what is to be written'")
				return err
			})
		})
	fmt.Println(err)
	// Output: <nil>
}

// A database of database/sql all of whose transactions present the token: code that knows nothing of leases is fenced.
func ExampleConnector() {
	ctx := context.Background()
	config, err := pgx.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	err = pgfence.NewConfig(config).Hold(ctx, "page:7", pgfence.Options{},
		func(ctx context.Context, lease *pgfence.Lease) error {
			db := sql.OpenDB(pgfence.Connector(lease, config))
			defer db.Close()
			var token int64
			err := db.QueryRowContext(ctx, "SELECT current_setting('pg_fence.token')::bigint").Scan(&token)
			fmt.Println(token == lease.Token())
			return err
		})
	fmt.Println(err)
	// Output:
	// true
	// <nil>
}
