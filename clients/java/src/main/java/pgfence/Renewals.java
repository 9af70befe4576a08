package pgfence;

import java.lang.System.Logger.Level;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import pgfence.FenceException.Reason;

/** How leases are renewed: many by one statement, each with an answer of its own, and none held up by another. */
abstract class Renewals extends Monitor {
    /** So many leases are renewed by one statement: each takes locks until its end. */
    private static final int BATCH = 500;

    private static final long SHORTEST_LOCK_LIMIT = TimeUnit.MILLISECONDS.toNanos(10);

    final Fence fence;
    /** Those that are kept. The lock guards them, and what is in each. */
    final Set<Kept> leases = new LinkedHashSet<>();

    Renewals(Fence fence) {
        this.fence = fence;
    }

    abstract void lose(Kept kept, Reason reason, SQLException cause);

    /** As soon as it can be. */
    final void beatNow(Kept kept) {
        locked(() -> {
            kept.nextBeat = Clock.now();
            kept.beatsAgain = kept.isBeating;
            changed.signalAll();
        });
    }

    /** In the order of the names. A lease of several names has a statement of its own. */
    static List<List<Kept>> batches(List<Kept> due) {
        List<Kept> ordered = due.stream()
                .filter(kept -> !kept.isOfSeveral())
                .sorted(Comparator.comparing(kept -> kept.names.get(0), Sql.BY_BYTES))
                .toList();
        List<List<Kept>> batches = new ArrayList<>();
        for (int begin = 0; begin < ordered.size(); begin += BATCH) {
            batches.add(ordered.subList(begin, Math.min(begin + BATCH, ordered.size())));
        }
        due.stream().filter(Kept::isOfSeveral).map(List::of).forEach(batches::add);
        return batches;
    }

    /** Renews them; whether the server could be reached. */
    boolean beat(OwnConnection own, List<Kept> batch) {
        long ttl = shortestTtl(batch);
        return beat(own, batch, lockLimit(ttl), true);
    }

    private boolean beat(OwnConnection own, List<Kept> all, long lockLimit, boolean mayReconnect) {
        long before = Clock.now();
        List<Kept> batch = locked(() -> all.stream().filter(kept -> kept.isRenewed(before)).toList());
        if (batch.isEmpty()) {
            return true;
        }
        boolean reusesConnection = own.isOpen();
        try {
            Long[] tokens = renew(own, batch, shortestTtl(batch) / 3, lockLimit);
            renewed(batch, before, tokens);
            return true;
        } catch (SQLException error) {
            if (!own.isOpen()) {
                // It may have ended unseen since the last time: a new one may do at once.
                if (reusesConnection && mayReconnect) {
                    return beat(own, batch, lockLimit, false);
                }
                Holding.LOG.log(Level.WARNING, "{0} leases were not renewed: {1}", batch.size(), error.getMessage());
                tryLater(batch);
                return false;
            }
            if (batch.size() > 1) {
                // One of them fails all: halves find it. Where many are locked, their waits must not add up.
                int half = batch.size() / 2;
                long shorter = Math.max(lockLimit / 10, TimeUnit.MILLISECONDS.toNanos(1));
                return beat(own, batch.subList(0, half), shorter, mayReconnect)
                        && beat(own, batch.subList(half, batch.size()), shorter, mayReconnect);
            }
            failedAlone(batch.get(0), error);
            return true;
        }
    }

    /** No loss yet where trying again can help: the deadline tells. */
    private void failedAlone(Kept kept, SQLException error) {
        Holding.LOG.log(Level.WARNING, "the lease {0} was not renewed: {1}", kept.names.get(0), error.getMessage());
        if (FenceException.isPermanent(error)) {
            lose(kept, Reason.DENIED, error);
        }
        locked(() -> kept.isApart = true);
        tryLater(List.of(kept));
    }

    final void tryLater(List<Kept> batch) {
        long now = Clock.now();
        locked(() -> batch.forEach(kept -> kept.nextBeat = now + kept.ttl / 12));
    }

    private void renewed(List<Kept> batch, long before, Long[] tokens) {
        for (int index = 0; index < tokens.length; index++) {
            if (tokens[index] == null) {
                lose(batch.get(index), Reason.GONE, null);
            } else {
                countsFrom(batch.get(index), before, tokens[index]);
            }
        }
    }

    /** Renews them by one statement. For each its new token, or null where it is gone. */
    Long[] renew(OwnConnection own, List<Kept> batch, long limit, long lockLimit) throws SQLException {
        Kept first = batch.get(0);
        if (first.isOfSeveral()) {
            String all = fence.select("lease_renew_all(?, ?)");
            return own.transaction(limit, lockLimit, on -> new Long[] {Sql.value(on, all, first.name(), first.token)});
        }
        String[] names = batch.stream().map(kept -> kept.names.get(0)).toArray(String[]::new);
        Long[] tokens = batch.stream().map(kept -> kept.token).toArray(Long[]::new);
        String each = "SELECT x.number, " + fence.named("lease_renew(x.name, x.token)")
                + " FROM unnest(?, ?) WITH ORDINALITY AS x(name, token, number)";
        return own.transaction(limit, lockLimit, on -> {
            Long[] renewed = new Long[names.length];
            try (PreparedStatement statement = Sql.prepare(on, each, names, tokens);
                    ResultSet rows = statement.executeQuery()) {
                while (rows.next()) {
                    renewed[rows.getInt(1) - 1] = Sql.number(rows, 2);
                }
            }
            return renewed;
        });
    }

    /** Granted or renewed by a call that was begun at {@code before}: from there the ttl counts. */
    void countsFrom(Kept kept, long before, long token) {
        locked(() -> {
            kept.deadline = before + kept.ttl;
            kept.nextBeat = before + kept.third;
            kept.renewed = token;
            kept.isApart = false;
            changed.signalAll();
        });
    }

    // Times

    final long shortestTtl() {
        return locked(() -> shortestTtl(leases));
    }

    static long shortestTtl(Iterable<Kept> leases) {
        long shortest = Clock.nanos(Duration.ofDays(366));
        for (Kept kept : leases) {
            shortest = Math.min(shortest, kept.ttl);
        }
        return shortest;
    }

    /** How long a statement waits for somebody's open transaction, while other leases wait for it. */
    static long lockLimit(long ttl) {
        return Math.max(ttl / 240, SHORTEST_LOCK_LIMIT);
    }
}
