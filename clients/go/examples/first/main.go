package main

import "context"
import "log"
import "os"
import "github.com/jackc/pgx/v4"
import "pgfence"

func main() {
	conn, err := pgx.Connect(context.Background(), os.Args[1])
	if err == nil { // Whatever takes long goes where the lease is held: a heartbeat keeps it meanwhile.
		err = pgfence.New(os.Args[1]).Hold(context.Background(), "order:7", pgfence.Options{}, func(ctx context.Context, lease *pgfence.Lease) error {
			return pgfence.Guard(ctx, lease, conn.Begin, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "UPDATE orders SET status = 'paid' WHERE id = 7")
				return err
			})
		})
	}
	log.Println("done, taken (try later), or lost (stop, and report no failure):", err)
}
