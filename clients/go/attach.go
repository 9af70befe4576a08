package pgfence

import (
	"context"
	"database/sql/driver"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// Presenting is a copy of that configuration whose connections present the lease's token in every transaction, so that code
// which knows nothing of fences is fenced by its connection alone. It is for pgx.ConnectConfig, for the ConnConfig of a
// pgxpool.Config, and for [Connector]. Once the lease is lost or released it opens no more connections, and the server
// refuses the writes of those that are open. Nothing is guarded: it is as [Present] with all transactions. Not through a
// pooler.
func Presenting(lease Holding, config *pgx.ConnConfig) *pgx.ConnConfig {
	presenting := config.Copy()
	if presenting.RuntimeParams == nil {
		presenting.RuntimeParams = map[string]string{}
	}
	options := OptionsOf(lease)
	if own := presenting.RuntimeParams["options"]; own != "" {
		options = own + " " + options
	}
	presenting.RuntimeParams["options"] = options
	after := presenting.AfterConnect
	presenting.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		for _, one := range lease.each() {
			if err := one.refuseIfOver(); err != nil {
				return err
			}
		}
		if after != nil {
			return after(ctx, conn)
		}
		return nil
	}
	return presenting
}

// Connector is for sql.OpenDB: a database each of whose transactions presents the lease's token. See [Presenting].
func Connector(lease Holding, config *pgx.ConnConfig) driver.Connector {
	return stdlib.GetConnector(*Presenting(lease, config))
}

// OptionsOf is the value of "options" in a connection string, or of the environment's PGOPTIONS, with which whatever stands
// on PostgreSQL's protocol presents the lease's token in every transaction: psql in a subprocess, for one.
func OptionsOf(lease Holding) string {
	return "-c pg_fence.token=" + strconv.FormatInt(lease.Token(), 10)
}
