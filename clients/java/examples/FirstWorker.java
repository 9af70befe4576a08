import pgfence.*;
import pgfence.FenceException.*;

import java.sql.DriverManager;
import java.time.Duration;

class FirstWorker {
    public static void main(String[] args) throws Exception {
        try (var fence = new Fence(args[0]);
                var connection = DriverManager.getConnection("jdbc:" + args[0])) {
            try (var lease = fence.lease("order:7", new Options().ttl(Duration.ofSeconds(30)))) {
                System.out.println("order:7 is ours, under token " + lease.token());
                // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
                Thread.sleep(3000);
                var pay = "UPDATE orders SET status = 'paid' WHERE id = 7";
                lease.guard(connection, () -> connection.createStatement().execute(pay));
                System.out.println("order 7 is paid");
            }
        } catch (LeaseTaken taken) {
            System.out.println("somebody else is at it: " + taken.getMessage());
        } catch (LeaseLost lost) {
            System.out.println("stop, and report no failure: " + lost.getMessage());
        }
    }
}
