package pgfence;

import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.BooleanSupplier;
import java.util.function.LongSupplier;
import java.util.function.Supplier;

/** A lock, and the one condition under it: something has changed. */
abstract class Monitor {
    final ReentrantLock lock = new ReentrantLock();
    final Condition changed = lock.newCondition();

    final void wake() {
        locked(changed::signalAll);
    }

    final <T> T locked(Supplier<T> work) {
        lock.lock();
        try {
            return work.get();
        } finally {
            lock.unlock();
        }
    }

    final void locked(Runnable work) {
        lock.lock();
        try {
            work.run();
        } finally {
            lock.unlock();
        }
    }

    /** Waits for that time, or a change, or for a second. The lock is held. */
    final void pauseUntil(LongSupplier time) {
        try {
            changed.awaitNanos(Math.max(0, Math.min(time.getAsLong() - Clock.now(), Clock.LOOK_AGAIN)));
        } catch (InterruptedException nobodyDoes) {
            Thread.currentThread().interrupt();
        }
    }

    /** Whether it came true by then. The lock is held. */
    final boolean await(long until, BooleanSupplier comesTrue) throws InterruptedException {
        while (!comesTrue.getAsBoolean()) {
            long left = until - Clock.now();
            if (left <= 0) {
                return false;
            }
            changed.awaitNanos(Math.min(left, Clock.LOOK_AGAIN));
        }
        return true;
    }

    final void awaitUninterruptibly(long until, BooleanSupplier comesTrue) {
        boolean wasInterrupted = false;
        while (true) {
            try {
                await(until, comesTrue);
                break;
            } catch (InterruptedException later) {
                wasInterrupted = true;
            }
        }
        if (wasInterrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
