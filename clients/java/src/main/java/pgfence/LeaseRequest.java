package pgfence;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.UUID;
import java.util.function.Consumer;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.LeaseTaken;

/** How a lease is asked for: {@code fence.lease("order:7").ttl(Duration.ofSeconds(30)).acquire()}. */
public final class LeaseRequest {
    final Fence fence;
    final List<String> names;
    Duration ttl = Duration.ofSeconds(30);
    Duration wait = Duration.ZERO;
    String holder = uniqueHolder();
    String metadata;
    boolean shared;
    int slots = 1;
    boolean session;
    boolean reclaim;
    final List<Consumer<LeaseLost>> onLost = new ArrayList<>();

    LeaseRequest(Fence fence, List<String> names) {
        if (names.isEmpty()) {
            throw new IllegalArgumentException("a lease needs a name");
        }
        this.fence = fence;
        this.names = names;
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

    /** How long it is held without a renewal: 30 s. */
    public LeaseRequest ttl(Duration ttl) {
        if (ttl.isNegative() || ttl.isZero()) {
            throw new IllegalArgumentException("a ttl is longer than nothing");
        }
        this.ttl = ttl;
        return this;
    }

    /** How long to wait in line for it. */
    public LeaseRequest waiting(Duration wait) {
        this.wait = wait;
        return this;
    }

    /** Who has it, for the view of all leases; by default a text that is unique for each request. */
    public LeaseRequest holder(String holder) {
        this.holder = holder;
        return this;
    }

    /** JSON, for the view of all leases. */
    public LeaseRequest metadata(String json) {
        metadata = json;
        return this;
    }

    /** Others may have it shared at the same time. */
    public LeaseRequest shared() {
        shared = true;
        return this;
    }

    /** So many may have it at the same time. */
    public LeaseRequest slots(int slots) {
        this.slots = slots;
        return this;
    }

    /** It ends with its session, too. Not through a pooler. */
    public LeaseRequest session() {
        session = true;
        return this;
    }

    /** Where that holder has it already, it gets a new grant at once. */
    public LeaseRequest reclaim(String holder) {
        reclaim = true;
        return holder(holder);
    }

    /** Told of a loss, from another thread, at the deadline at the latest. */
    public LeaseRequest onLost(Consumer<LeaseLost> tell) {
        onLost.add(tell);
        return this;
    }

    /** Throws LeaseTaken where it is taken, and stayed so for as long as we waited. An interrupt gives up. */
    public Lease acquire() throws SQLException, InterruptedException {
        return tryAcquire().orElseThrow(() -> new LeaseTaken(names));
    }

    /** Empty where it is taken, and stayed so for as long as we waited. An interrupt gives up. */
    public Optional<Lease> tryAcquire() throws SQLException, InterruptedException {
        if (names.size() > 1 && (shared || slots != 1 || reclaim)) {
            throw new IllegalArgumentException("several names at once are exclusive: no shared, slots or reclaim");
        }
        Lease lease = fence.make(this);
        return lease.acquire() ? Optional.of(lease) : Optional.empty();
    }
}
