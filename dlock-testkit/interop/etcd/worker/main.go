// Takes a lock of Go's concurrency package again and again, and prints when it held it, one
// line each: the kind (X exclusive) and the times of begin and end, in nanoseconds of the
// monotonic clock that all processes of the machine share.
//
//	worker HOST:PORT mutex NAME SECONDS
//
// With another kind it measures instead, with TASKS goroutines:
//
//	worker HOST:PORT hot NAME SECONDS TASKS    one lock, a session each
//	worker HOST:PORT each NAME SECONDS TASKS   a lock each, one session
//	worker HOST:PORT rpc NAME SECONDS TASKS    one lock, by the Lock RPC of the server
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"

	"go.etcd.io/etcd/client/v3/concurrency"
	"golang.org/x/sys/unix"

	clientv3 "go.etcd.io/etcd/client/v3"
	pb "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		log.Fatal(err)
	}
	return t.Nano()
}

func connect(host string) *clientv3.Client {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:   []string{host},
		DialTimeout: 5 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	return client
}

func session(client *clientv3.Client) *concurrency.Session {
	session, err := concurrency.NewSession(client, concurrency.WithTTL(2))
	if err != nil {
		log.Fatal(err)
	}
	return session
}

// work takes the lock until the end, and prints when it was held.
func work(host, name string, seconds int) {
	client := connect(host)
	session := session(client)
	mutex := concurrency.NewMutex(session, name)
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil { // all begin together
		log.Fatal(err)
	}
	end := now() + int64(seconds)*int64(time.Second)
	for now() < end {
		if err := mutex.Lock(context.Background()); err != nil {
			log.Fatal(err)
		}
		begin := now()
		time.Sleep(time.Millisecond)
		fmt.Println("X", begin, now())
		if err := mutex.Unlock(context.Background()); err != nil {
			log.Fatal(err)
		}
	}
	session.Close()
	client.Close()
	fmt.Println("done")
}

// measure prints how often tasks took a lock, and how long that took.
func measure(host, kind, name string, seconds, tasks int) {
	client := connect(host)
	shared := session(client)
	var mutex sync.Mutex
	var waits []time.Duration
	var group sync.WaitGroup
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	for task := 0; task < tasks; task++ {
		group.Add(1)
		go func() {
			defer group.Done()
			var own []time.Duration
			ctx := context.Background()
			cycle := cycle(client, shared, kind, name, task)
			for time.Now().Before(end) {
				began := time.Now()
				unlock := cycle(ctx)
				own = append(own, time.Since(began))
				unlock(ctx)
			}
			mutex.Lock()
			waits = append(waits, own...)
			mutex.Unlock()
		}()
	}
	group.Wait()
	sort.Slice(waits, func(a, b int) bool { return waits[a] < waits[b] })
	at := func(part float64) time.Duration { return waits[int(part*float64(len(waits)-1))] }
	fmt.Printf("%s: %.0f locks/s, p50 %v, p99 %v\n", kind,
		float64(len(waits))/float64(seconds), at(0.5), at(0.99))
}

// cycle returns what takes a lock, and returns what gives it back.
func cycle(client *clientv3.Client, shared *concurrency.Session, kind, name string,
	task int,
) func(context.Context) func(context.Context) {
	if kind == "rpc" {
		locks := pb.NewLockClient(client.ActiveConnection())
		lease := session(client).Lease()
		return func(ctx context.Context) func(context.Context) {
			held, err := locks.Lock(ctx, &pb.LockRequest{Name: []byte(name), Lease: int64(lease)})
			if err != nil {
				log.Fatal(err)
			}
			return func(ctx context.Context) {
				if _, err := locks.Unlock(ctx, &pb.UnlockRequest{Key: held.Key}); err != nil {
					log.Fatal(err)
				}
			}
		}
	}
	lock := concurrency.NewMutex(shared, name+strconv.Itoa(task))
	if kind == "hot" {
		lock = concurrency.NewMutex(session(client), name)
	}
	return func(ctx context.Context) func(context.Context) {
		if err := lock.Lock(ctx); err != nil {
			log.Fatal(err)
		}
		return func(ctx context.Context) {
			if err := lock.Unlock(ctx); err != nil {
				log.Fatal(err)
			}
		}
	}
}

func main() {
	number := func(at int) int {
		number, err := strconv.Atoi(os.Args[at])
		if err != nil {
			log.Fatal(err)
		}
		return number
	}
	host, kind, name := os.Args[1], os.Args[2], os.Args[3]
	if kind == "mutex" {
		work(host, name, number(4))
	} else {
		measure(host, kind, name, number(4), number(5))
	}
}
