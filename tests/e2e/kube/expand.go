// Expand $(NAME) as a kubelet does, by its own code: JSON lines of {"text": …, "env": {…}} in, JSON texts out.
package main

import (
	"encoding/json"
	"io"
	"os"

	"k8s.io/kubernetes/third_party/forked/golang/expansion"
)

func main() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var asked struct {
			Text string
			Env  map[string]string
		}
		if err := in.Decode(&asked); err == io.EOF {
			return
		} else if err != nil {
			panic(err)
		}
		if err := out.Encode(expansion.Expand(asked.Text, expansion.MappingFuncFor(asked.Env))); err != nil {
			panic(err)
		}
	}
}
