// The etcd server. (`go install` of its own module is refused because of its replace
// directives.)
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
