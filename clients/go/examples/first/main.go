package main

import "context"
import "fmt"
import "os"
import "time"
import "github.com/jackc/pgx/v5"
import "pgfence.example/pgfence"

func main() {
	err := pgfence.New(os.Args[1]).Lease(context.Background(), "order:7", pgfence.Options{}, func(ctx context.Context, lease *pgfence.Lease) error {
		time.Sleep(3 * time.Second) // Whatever takes long: the lease is kept meanwhile. Start another one now.
		conn, err := pgx.Connect(ctx, os.Args[1])
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		return lease.Guard(ctx, conn, func(ctx context.Context, tx pgx.Tx) error {
			paid, err := tx.Exec(ctx, "UPDATE orders SET status = 'paid' WHERE id = 7")
			fmt.Println("token", lease.Token(), "pays order 7:", paid)
			return err
		})
	})
	fmt.Println("error, if any:", err)
}
