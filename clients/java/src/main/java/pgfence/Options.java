package pgfence;

import java.io.IOException;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.function.Consumer;

/**
 * The options of an acquire. By default the ttl is 30 s, and the lease is exclusive and acquired
 * without a wait. Options do not change: each method returns changed ones.
 */
public final class Options implements Cloneable {
    // In milliseconds.
    long ttl = 30_000, wait, atMost = LeaseStates.NEVER;
    String holder, metadata, fence = "fence", deadline = "held_until";

    /** True if no other acquire has the same holder. */
    boolean isHolderUnique;

    boolean reclaim, session, shared;
    int slots = 1;

    /**
     * Sets the ttl: how long the lease is held after its last renewal. It is at least 100 ms. The
     * heartbeat renews the lease each third of it.
     */
    public Options ttl(Duration ttl) {
        if (millis(ttl) < 100) {
            throw new IllegalArgumentException(
                    "a ttl of " + millis(ttl) + " ms: it takes at least 100 ms");
        }
        return with(options -> options.ttl = millis(ttl));
    }

    /** Sets how long to wait for the lease if it is taken, and for the end of an outage. */
    public Options waitUpTo(Duration wait) {
        if (wait.isNegative()) {
            throw new IllegalArgumentException("a wait is not negative: " + wait);
        }
        return with(options -> options.wait = millis(wait));
    }

    /**
     * Sets how long the lease is held at most: after that time it is lost, whatever its heartbeat
     * does. It is for work that hangs.
     */
    public Options atMost(Duration atMost) {
        if (millis(atMost) < 1) {
            throw new IllegalArgumentException("at most " + atMost + ": it takes a millisecond");
        }
        return with(options -> options.atMost = millis(atMost));
    }

    /** Sets the name of the holder, which others see. By default it is unique for each acquire. */
    public Options holder(String holder) {
        return with(options -> options.holder = holder);
    }

    /** Takes the lease over if the same {@link #holder} has it already. */
    public Options reclaim() {
        return with(options -> options.reclaim = true);
    }

    /**
     * Makes a session lease, which has a separate connection and also ends with that connection,
     * and so with the process. It does not work through a pooler.
     */
    public Options session() {
        return with(options -> options.session = true);
    }

    /** Makes a shared lease: any number of holders share it, but none beside an exclusive one. */
    public Options shared() {
        return with(options -> options.shared = true);
    }

    /** Sets the number of holders that can have the lease at the same time. */
    public Options slots(int slots) {
        return with(options -> options.slots = slots);
    }

    /** Sets the metadata, a JSON text, which others see. */
    public Options metadata(String json) {
        return with(options -> options.metadata = json);
    }

    /**
     * Sets the columns of the token and of the deadline for {@link Fence#keepRow}, if they are not
     * called fence and held_until.
     */
    public Options columns(String fence, String deadline) {
        return with(
                options -> {
                    options.fence = Objects.requireNonNull(fence);
                    options.deadline = Objects.requireNonNull(deadline);
                });
    }

    /** Converts a time to milliseconds. A longer time than NEVER counts as NEVER. */
    private static long millis(Duration span) {
        boolean isEndless = span.getSeconds() >= LeaseStates.NEVER / 1000;
        return isEndless ? LeaseStates.NEVER : span.toMillis();
    }

    boolean isShared() {
        return shared || slots > 1;
    }

    /** Returns options with a holder: a unique one, unless the program has named one. */
    Options withHolder() {
        if (holder != null || reclaim) {
            return this;
        }
        return with(
                options -> {
                    options.holder = uniqueHolder();
                    options.isHolderUnique = true;
                });
    }

    /** The default holder of adopted leases: all fences of this process are one holder. */
    static final String PROCESS_HOLDER = uniqueHolder();

    /** Reads the host's name from the system, as a resolver may be slow. */
    private static String uniqueHolder() {
        String host = System.getenv().getOrDefault("COMPUTERNAME", "java");
        try {
            host = Files.readString(Path.of("/proc/sys/kernel/hostname")).strip();
        } catch (IOException elsewhere) {
            // Only Linux has this file.
        }
        return host
                + '/'
                + ProcessHandle.current().pid()
                + '/'
                + UUID.randomUUID().toString().substring(0, 8);
    }

    private Options with(Consumer<Options> change) {
        try {
            Options other = (Options) clone();
            change.accept(other);
            return other;
        } catch (CloneNotSupportedException never) {
            throw new IllegalStateException(never);
        }
    }
}
