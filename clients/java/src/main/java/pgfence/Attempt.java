package pgfence;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.locks.LockSupport;
import pgfence.FenceException.AcquireTimeout;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.Reason;

/**
 * One acquire of a request: by the keeper's connection where it only tries; by one of its own where it may wait, or where
 * the lease is bound to its session.
 */
final class Attempt {
    /** The server has no line to wait in for several at once. */
    private static final long TRY_SEVERAL_AGAIN = 250_000_000;

    private final LeaseRequest request;
    private final Fence fence;
    private final Keeper keeper;
    private final Kept kept;
    private final Lease lease;
    private final String holder;
    /** A grant of this holder's is our own: an answer was lost. */
    private final boolean mayReclaim;
    private final Separate<Boolean> separate;

    Attempt(LeaseRequest request) {
        this.request = request;
        fence = request.fence;
        keeper = fence.keeper();
        kept = new Kept(request.names, request);
        lease = new Lease(fence, kept, Map.of());
        holder = request.holder == null ? uniqueHolder() : request.holder;
        mayReclaim = request.holder == null && !kept.isOfSeveral();
        separate = new Separate<>(fence, this::acquireOn);
    }

    /** What the view of all leases shows as the holder, unless one is named. */
    static String uniqueHolder() {
        String host;
        try {
            // Java would ask the resolver, which may hang.
            host = Files.readString(Path.of("/proc/sys/kernel/hostname")).strip();
        } catch (IOException elsewhere) {
            host = Optional.ofNullable(System.getenv("COMPUTERNAME")).orElse("java");
        }
        return host + "/" + ProcessHandle.current().pid() + "/" + UUID.randomUUID().toString().substring(0, 8);
    }

    /** The lease, unless it is taken. */
    Optional<Lease> acquire() throws SQLException, InterruptedException {
        boolean waits = !request.wait.isZero() || request.session;
        long limit = kept.third + Clock.nanos(request.wait);
        return told("acquire", limit, () -> {
            boolean isOurs = waits ? separate.get() : keeper.attempt(kept, this);
            return isOurs ? Optional.of(lease) : Optional.empty();
        });
    }

    /** Ends the wait in line, from another thread. */
    void giveUp() {
        separate.giveUp();
    }

    private <T> T told(String verb, long limit, Fence.OwnCall<T> call) throws SQLException, InterruptedException {
        return fence.told(verb, kept.names, () -> {
            long begun = Clock.now();
            try {
                return call.get();
            } catch (SQLException error) {
                boolean isLate = FenceException.isEnd(error) && Clock.now() - begun >= limit;
                if (error instanceof OwnConnection.BrokenOff || isLate) {
                    throw new AcquireTimeout(kept.names, error);
                }
                throw error;
            }
        });
    }

    /** By the keeper's connection; {@code before} is when the call was begun that granted. */
    Long tryOn(OwnConnection own, long limit, long[] before) throws SQLException {
        boolean reusesConnection = own.isOpen();
        if (reusesConnection && !mayReclaim) {
            // It may have ended unseen, and nothing tells whether a lost answer was a grant: so it is asked before.
            renewConnection(own, limit);
        }
        before[0] = Clock.now();
        try {
            return ask(own, limit, request.reclaim);
        } catch (SQLException error) {
            boolean wasShort = error instanceof OwnConnection.BrokenOff && limit < kept.third;
            if (own.isOpen() || !mayReclaim || !reusesConnection && !wasShort) {
                throw error;
            }
            before[0] = Clock.now();
            return ask(own, limit, true);
        }
    }

    private static void renewConnection(OwnConnection own, long limit) throws SQLException {
        try {
            own.value(limit, "SELECT 1");
        } catch (SQLException error) {
            if (own.isOpen()) {
                throw error;
            }
        }
    }

    /** By the connection of its own. */
    private boolean acquireOn(OwnConnection own, Separate<Boolean> call) throws SQLException {
        long before = Clock.now();
        Long granted = request.wait.isZero() || !kept.isOfSeveral()
                ? ask(own, kept.third + Clock.nanos(request.wait), request.reclaim)
                : askUntil(own, before + Clock.nanos(request.wait));
        if (granted == null) {
            return false;
        }
        kept.token = granted;
        // After a wait in line the server counts from a later moment than we do: a renewal mends that.
        Long renewed = granted;
        while (renewed != null && Clock.now() >= before + kept.third && !call.isGivenUp()) {
            before = Clock.now();
            renewed = keeper.renew(own, List.of(kept), kept.third, kept.third)[0];
        }
        if (renewed == null) {
            return false;
        }
        long from = before;
        boolean isWanted = call.deliver(() -> {
            Connection session = request.session ? own.take() : null;
            keeper.keep(kept, from, granted, session);
        });
        if (!isWanted) {
            // On a new connection: a cancel that is late would end the release.
            own.close();
            keeper.giveBackUnwanted(own, kept, kept.third);
        }
        return isWanted;
    }

    /** Tries again and again, which {@link #giveUp} ends. */
    private Long askUntil(OwnConnection own, long until) throws SQLException {
        while (true) {
            Long granted = ask(own, kept.third, false);
            long left = until - Clock.now();
            if (granted != null || left <= 0 || separate.isGivenUp()) {
                return granted;
            }
            LockSupport.parkNanos(Math.min(left, TRY_SEVERAL_AGAIN));
        }
    }

    private Long ask(OwnConnection own, long limit, boolean reclaim) throws SQLException {
        String ttl = Sql.interval(request.ttl);
        if (kept.isOfSeveral()) {
            return own.value(limit, fence.select("lease_acquire_all(?, ?, ?::interval, ?::jsonb, ?)"), kept.name(), holder,
                    ttl, request.metadata, request.session);
        }
        String call = "lease_acquire(?, ?, ?::interval, ?::interval, ?::jsonb, ?, ?, ?, ?)";
        return own.value(limit, fence.select(call), kept.name(), holder, ttl, Sql.interval(request.wait),
                request.metadata, request.shared, request.slots, reclaim, request.session);
    }

    /** The lease, kept from now on by the grant's first token, which serves for as long as the grant lives. */
    Lease resume(long token) throws SQLException, InterruptedException {
        String sql = "SELECT coalesce((SELECT i.first_token FROM " + fence.named("lease_info(?, t)")
                + " AS i WHERE i.token = t), t) FROM " + fence.named(kept.form("lease_renew") + "(?, ?, ?::interval)")
                + " AS t";
        Separate<Boolean> call = new Separate<>(fence, (own, self) -> {
            long before = Clock.now();
            Long first = own.transaction(kept.third, kept.third, on -> Sql.value(on, sql, kept.names.get(0), kept.name(),
                    token, Sql.interval(request.ttl)));
            return first != null && self.deliver(() -> keeper.keep(kept, before, first, null));
        });
        return told("resume", kept.third, () -> {
            if (!call.get()) {
                throw new LeaseLost(Reason.GONE, kept.names, null);
            }
            return lease;
        });
    }
}
