// Takes a lock of Consul's Go package again and again, and prints when it held it, one line
// each: the kind (X exclusive, P permit) and the times of begin and end, in nanoseconds of the
// monotonic clock that all processes of the machine share.
//
//	consul_worker ADDRESS KIND KEY TTL
//
// KIND is mutex, or semaphore (of two permits). It begins when it reads a line, and ends when it
// reads another one.
//
//	consul_worker stamp MILLISECONDS
//
// Prints such a line for a mutex that somebody else holds meanwhile: `consul lock`.
//
//	consul_worker bench ADDRESS hot|own TASKS SECONDS
//
// Counts how often tasks take and release a lock: the same one, or one each.
package main

import (
	"bufio"
	"fmt"
	"os"
	"sort"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/hashicorp/consul/api"
)

const clockMonotonic = 1

func now() int64 {
	var time syscall.Timespec
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&time)), 0)
	return time.Nano()
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// stamp prints a line for a while during which a lock is held.
func stamp(kind string, while time.Duration) {
	from := now()
	time.Sleep(while)
	fmt.Println(kind, from, now())
}

func connect(address string) *api.Client {
	config := api.DefaultConfig()
	config.Address = address
	client, err := api.NewClient(config)
	check(err)
	return client
}

// session makes a session that is kept alive until the process ends.
func session(client *api.Client, ttl string) string {
	entry := &api.SessionEntry{TTL: ttl, LockDelay: time.Millisecond, Behavior: "delete"}
	id, _, err := client.Session().CreateNoChecks(entry, nil)
	check(err)
	go client.Session().RenewPeriodic(ttl, id, nil, make(chan struct{}))
	return id
}

func work(address, kind, key, ttl string) {
	client := connect(address)
	id := session(client, ttl)
	lock, err := client.LockOpts(&api.LockOptions{Key: key, Session: id})
	check(err)
	permits, err := client.SemaphoreOpts(&api.SemaphoreOptions{Prefix: key, Limit: 2, Session: id})
	check(err)
	input := bufio.NewReader(os.Stdin)
	fmt.Println("ready")
	input.ReadString('\n') // all begin together
	stop := make(chan struct{})
	go func() {
		input.ReadString('\n')
		close(stop)
	}()
	for {
		select {
		case <-stop:
			client.Session().Destroy(id, nil)
			fmt.Println("done")
			return
		default:
		}
		var held <-chan struct{}
		if kind == "semaphore" {
			held, err = permits.Acquire(stop)
		} else {
			held, err = lock.Lock(stop)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err) // for example a lock-delay of the contender's key
			time.Sleep(20 * time.Millisecond)
			continue
		}
		if held == nil {
			continue
		}
		if kind == "semaphore" {
			stamp("P", 10*time.Millisecond)
			check(permits.Release())
		} else {
			stamp("X", time.Millisecond)
			check(lock.Unlock())
		}
		time.Sleep(2 * time.Millisecond) // there is no order: others would not get their turn
	}
}

func bench(address, keys string, tasks int, length time.Duration) {
	client := connect(address)
	var times []time.Duration
	var mutex sync.Mutex
	var all sync.WaitGroup
	end := time.Now().Add(length)
	for task := 0; task < tasks; task++ {
		key := "bench/go"
		if keys == "own" {
			key = fmt.Sprintf("bench/go-%d", task)
		}
		id := session(client, "15s")
		lock, err := client.LockOpts(&api.LockOptions{Key: key, Session: id})
		check(err)
		all.Add(1)
		go func() {
			defer all.Done()
			for time.Now().Before(end) {
				asked := time.Now()
				_, err := lock.Lock(nil)
				check(err)
				waited := time.Since(asked)
				check(lock.Unlock())
				mutex.Lock()
				times = append(times, waited)
				mutex.Unlock()
			}
			client.Session().Destroy(id, nil)
		}()
	}
	all.Wait()
	sort.Slice(times, func(a, b int) bool { return times[a] < times[b] })
	fmt.Printf("%.1f locks/s, p50 %v, p99 %v\n", float64(len(times))/length.Seconds(),
		times[len(times)/2], times[len(times)*99/100])
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	check(err)
	return value
}

func main() {
	arguments := os.Args[1:]
	switch {
	case len(arguments) == 2 && arguments[0] == "stamp":
		stamp("X", time.Duration(number(arguments[1]))*time.Millisecond)
	case len(arguments) == 5 && arguments[0] == "bench":
		bench(arguments[1], arguments[2], number(arguments[3]),
			time.Duration(number(arguments[4]))*time.Second)
	case len(arguments) == 4:
		work(arguments[0], arguments[1], arguments[2], arguments[3])
	default:
		fmt.Fprintln(os.Stderr, "usage: consul_worker ADDRESS mutex|semaphore KEY TTL")
		os.Exit(2)
	}
}
